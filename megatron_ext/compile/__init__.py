"""Construction of proved programs: families by name, transforms, proof, and where the output
layer's W goes."""
