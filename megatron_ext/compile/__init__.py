"""From a choice to a program: the families by name, their transforms, the output layer's W."""
