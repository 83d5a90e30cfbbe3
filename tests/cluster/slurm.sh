#!/usr/bin/env bash
# A real Slurm of one node on the loopback interface: munge, slurmctld and slurmd from Debian's packages, without
# systemd, cgroups or a database. For tests, as root.
#
#   slurm.sh install          packages, where they are missing
#   slurm.sh start FOLDER     start it; configuration, keys and logs lie in FOLDER
#   slurm.sh stop FOLDER      cancel its jobs and end it
#   slurm.sh node FOLDER up|down   take the node away, or give it back
#
# One node with CPUS (default 2) processors and two pretended GPUs (`gres:gpu`): device files that nothing reads.
set -euo pipefail

LINK=/etc/slurm/slurm.conf

fail() {
    echo "slurm.sh: error: $1" >&2
    exit 2
}

install_packages() {
    which slurmctld slurmd sbatch munged >/dev/null && return
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge
}

write_configuration() {
    local folder=$1 host memory
    host=$(hostname -s)
    memory=$(awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
    cat >"$folder/slurm.conf" <<CONF
ClusterName=draftpool
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${SLURMCTLD_PORT:-16817}
SlurmdPort=${SLURMD_PORT:-16818}
# Both daemons listen on 127.0.0.1 only.
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# One line for every finished job.
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/finished.txt
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Finished jobs stay visible to scontrol, which tells what they asked for.
MinJobAge=36000
# A killed job is gone at once, and a lost node is noticed soon.
KillWait=5
SlurmdTimeout=10
ReturnToService=2
DefMemPerCPU=1000
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=${CPUS:-2} RealMemory=$memory Gres=gpu:2
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    echo "NodeName=$host Name=gpu File=$folder/fakegpu[0-1]" >"$folder/gres.conf"
}

start() {
    local folder=$1 gpu
    [ "$(id -u)" = 0 ] || fail "starting Slurm needs root"
    [ ! -e "$LINK" ] || fail "$LINK is there already: another Slurm is set up on this machine"
    mkdir -p "$folder"/{state,spool} /etc/slurm
    for gpu in 0 1; do
        [ -e "$folder/fakegpu$gpu" ] || mknod "$folder/fakegpu$gpu" c 1 3
    done
    head -c 128 /dev/urandom >"$folder/munge.key"
    chmod 600 "$folder/munge.key"
    write_configuration "$folder"
    # The link, because a job's inner srun reads its configuration nowhere else.
    ln -s "$folder/slurm.conf" "$LINK"
    ln -sfn "$folder/gres.conf" /etc/slurm/gres.conf
    # munged refuses folders that others may write, which temporary ones are: --force.
    munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" \
        --pid-file "$folder/munged.pid" --seed-file "$folder/munge.seed" --log-file "$folder/munged.log"
    slurmctld -i
    slurmd
    for _ in $(seq 300); do
        [ "$(sinfo -h -o %t 2>/dev/null)" = idle ] && return
        sleep 0.1
    done
    tail -n 20 "$folder"/slurm*.log >&2
    stop "$folder"
    fail "the node did not become idle within 30 s"
}

stop() {
    local folder=$1 name pid
    [ "$(readlink "$LINK" 2>/dev/null)" = "$folder/slurm.conf" ] || fail "no Slurm of $folder is running"
    timeout 10 scancel --user=root --hurry 2>/dev/null || true
    for name in slurmd slurmctld munged; do
        pid=$(cat "$folder/$name.pid" 2>/dev/null || true)
        [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    done
    for _ in $(seq 100); do
        pgrep -F "$folder/slurmctld.pid" >/dev/null 2>&1 || break
        sleep 0.1
    done
    # Without its controller this file would make every call of the Slurm plugin wait ten seconds.
    rm -f "$LINK" /etc/slurm/gres.conf
}

node() {
    local folder=$1 host
    host=$(hostname -s)
    case $2 in
        down) scontrol update "nodename=$host" state=down reason=test ;;
        up) scontrol update "nodename=$host" state=idle ;;
        *) fail "node up or down?" ;;
    esac
}

[ "$#" -ge 1 ] || fail "install, start FOLDER, stop FOLDER or node FOLDER up|down"
[ "$1" = install ] || [ "$#" -ge 2 ] || fail "which FOLDER?"
case $1 in
    install) install_packages ;;
    start) start "$(realpath -m "$2")" ;;
    stop) stop "$(realpath -m "$2")" ;;
    node) node "$(realpath -m "$2")" "${3:-}" ;;
    *) fail "unknown command $1" ;;
esac
