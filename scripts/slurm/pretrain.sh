#!/usr/bin/env bash
# Pretrain with Megatron under a schedule of megatron_ext, on one node or on many:
#
#   sbatch --nodes 4 scripts/slurm/pretrain.sh $YOUR_FLAGS
#
# Out of time the job saves and queues again; whenever it is started again, it goes on from its last
# checkpoint. docs/checking-a-launch.md tells more.

#SBATCH --job-name=pretrain
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300  # 5 minutes before the time is up: enough to end a step and save
#SBATCH --requeue            # after preemption, and after a node has failed
#SBATCH --open-mode=append   # of the log, when the job goes on

SCRIPT=${SCRIPT:-pretrain_gpt.py}
CHECKPOINTS=${CHECKPOINTS:-checkpoints}  # on a file system that all nodes share
IMAGE=${IMAGE-}                          # a container for pyxis, ./x.sqsh if a file; empty: none
MOUNTS=${MOUNTS-$PWD:$PWD}               # what it sees of the host
FLAGS=(
  --pipeline-model-parallel-size 8
  --pipeline-schedule zb-v
  --save-interval 500  # what a failure goes back to
  "$@"
)

# Before Blackwell Megatron demands one queue for tensor parallelism, so that kernels start in order.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Says why a connection failed. INFO also says what it goes over: NET/IB, or the slow NET/Socket.
export NCCL_DEBUG=WARN
# The interface for first contacts. The one that NCCL and gloo find for themselves may lead nowhere (a
# bridge for containers, a management network), and then the start hangs.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# The adapters for messages, where others are for storage.
# export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3

# ---- from here on there is nothing to edit ----

# SLURM runs this script on the first node. A port a job, for jobs that share a node.
MASTER_ADDR=$(hostname)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

container=()
if [[ $IMAGE ]]; then
  container=(--container-image "$IMAGE" --container-mounts "$MOUNTS" --container-workdir "$PWD")
fi

last_checkpoint() { cat "$CHECKPOINTS/latest_checkpointed_iteration.txt" 2>/dev/null; }
began_at=$(last_checkpoint)

out_of_time() {
  echo 'out of time: saving, to go on later'
  scancel --signal USR2 "$SLURM_JOB_ID"  # of the steps: this shell is none
  wait "$training"
  # A job that has saved nothing would not get further the next time.
  [[ $(last_checkpoint) != "$began_at" ]] && scontrol requeue "$SLURM_JOB_ID"
}
trap out_of_time USR1

# One task a node, with all its cores. If one fails, the others would wait for it: end them.
# Ranks save and end on USR2, which reaches all of a node's processes and torchrun ignores. On SIGTERM
# torchrun would kill its ranks 30 seconds later, saved or not.
# shellcheck disable=SC2016  # each node's own variables
srun --ntasks-per-node 1 --cpu-bind none --kill-on-bad-exit "${container[@]}" bash -c '
  trap "" USR2
  exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' \
  torchrun -m megatron_ext "$SCRIPT" "${FLAGS[@]}" --save "$CHECKPOINTS" --load "$CHECKPOINTS" \
  --exit-signal-handler --exit-signal SIGUSR2 &
training=$!
wait "$training"
