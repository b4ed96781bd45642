#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, for as long as a command runs in it.
#
#   tests/slurm/cluster.sh --install      apt-get what is missing (Debian, Ubuntu)
#   tests/slurm/cluster.sh COMMAND...     for example: tests/slurm/cluster.sh bash
#
# Needs root. All files lie in CLUSTER, a new folder by default, and nothing of an installed SLURM is
# read or written. Each node, n1 and n2, says that it has 4 GPUs; none is there.
set -euo pipefail

if ((EUID)); then
  echo 'cluster.sh: needs root, as SLURM does to start jobs' >&2
  exit 1
fi
if [[ ${1-} == --install ]]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update && exec apt-get install --yes --no-install-recommends slurm-wlm munge
fi
for daemon in slurmctld slurmd munged; do
  if ! type -P "$daemon" >/dev/null; then
    echo "cluster.sh: there is no $daemon; tests/slurm/cluster.sh --install" >&2
    exit 1
  fi
done

CLUSTER=${CLUSTER:-$(mktemp --directory)}
export SLURM_CONF=$CLUSTER/slurm.conf
host=$(hostname -s)
port=$((10000 + RANDOM % 9000))  # three of them, unlike those of another cluster on this machine

mkdir -p "$CLUSTER"/{state,spool-n1,spool-n2}
chmod 755 "$CLUSTER"
cat >"$SLURM_CONF" <<CONF
ClusterName=two
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
# A requeued job waits until its credential has expired: 2 minutes by default.
AuthInfo=socket=$CLUSTER/munge.socket,cred_expire=5
StateSaveLocation=$CLUSTER/state
SlurmctldPidFile=$CLUSTER/slurmctld.pid
SlurmctldLogFile=$CLUSTER/slurmctld.log
SlurmdSpoolDir=$CLUSTER/spool-%n
SlurmdPidFile=$CLUSTER/slurmd-%n.pid
SlurmdLogFile=$CLUSTER/slurmd-%n.log
# The nodes have the resources that they claim here, not those of this machine.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,batch_sched_delay=0
# Other tests run beside it.
MessageTimeout=60
BatchStartTimeout=60
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
# MASTER_PORT depends on it, and another cluster may be running. It stays below 32768, from where the
# system gives ports to connections.
FirstJobId=$((RANDOM % 12000 + 1))
GresTypes=gpu
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=4 RealMemory=8000 Gres=gpu:4
PartitionName=p Nodes=n[1-2] Default=YES
CONF
echo "Name=gpu File=$CLUSTER/gpu[0-3] Flags=no_gpu_env" >"$CLUSTER/gres.conf"
touch "$CLUSTER"/gpu{0..3}
(umask 077 && head --bytes 128 /dev/urandom >"$CLUSTER/munge.key")

daemons=()
start() {
  setsid "$@" >>"$CLUSTER/daemons.log" 2>&1 </dev/null &
  daemons+=($!)
}

# Jobs first: what a node has started would outlive its daemon.
stop() {
  trap '' INT TERM
  scancel --user root --signal KILL  # their steps
  scancel --user root
  for _ in {1..600}; do
    [[ $(squeue --noheader 2>&1) ]] || break
    sleep 0.1
  done
  kill "${daemons[@]}"
  wait
}
trap stop EXIT

start munged --foreground --force --socket "$CLUSTER/munge.socket" --key-file "$CLUSTER/munge.key" \
  --pid-file "$CLUSTER/munged.pid" --seed-file "$CLUSTER/munged.seed" --log-file "$CLUSTER/munged.log"
start slurmctld -c -D
start slurmd -N n1 -D
start slurmd -N n2 -D

idle() { [[ $(sinfo --noheader --format %D%t 2>&1) == 2idle ]]; }
for _ in {1..1200}; do
  idle && break
  sleep 0.1
done
if ! idle; then
  echo 'cluster.sh: the nodes have not come up' >&2
  sinfo >&2
  tail --lines 20 "$CLUSTER"/*.log >&2
  exit 1
fi
"$@"
