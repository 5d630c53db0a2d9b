#!/bin/bash
# Slurm epilog: lets the agent that prolog.sh started ship the rest, then stops it and removes the
# job's spool folder. The node is free at once: this goes on behind it, for SMON_SLURM_DRAIN_S
# seconds at most (600). What could not be shipped stays, and the system log says so.
#
# Like the prolog it always succeeds, after a second at most: an epilog that fails drains the node.
set -u

config=${1:-/etc/smon/agent.yaml}
job=${SLURM_JOB_ID:-}

say() {
    logger -t smon-epilog -- "job ${job:-?}: $*" 2>/dev/null ||
        printf 'smon-epilog: job %s: %s\n' "${job:-?}" "$*" >&2
}

# The value of a `name: value` line of the agent's settings, or else what stands behind the name.
setting() {
    local line value=$2
    while IFS= read -r line || [[ -n $line ]]; do
        [[ $line =~ ^$1:[[:space:]]+([^#]*[^#[:space:]]) ]] || continue
        value=${BASH_REMATCH[1]}
        value=${value#[\"\']}
        value=${value%[\"\']}
    done <"$config"
    printf '%s' "$value"
}

# Whether batches wait in the spool.
waiting() {
    [[ -n $(find "$spool" -mindepth 2 -maxdepth 2 -name 'seg-*' -not -path "$spool/dead/*" \
        -not -path "$spool/quarantine/*" -print -quit 2>/dev/null) ]]
}

# Whether systemd runs this machine.
systemd() {
    [[ -d ${SMON_SLURM_SYSTEMD:-/run/systemd/system} ]] && command -v systemctl >/dev/null
}

# Number of the agent's process; a number that means another one by now does not count.
agent_pid() {
    local pid=''
    if systemd; then
        pid=$(systemctl show --property MainPID --value "smon-agent-job-$job.service" 2>/dev/null)
    elif [[ -s $run/job-$job.pid ]]; then
        pid=$(<"$run/job-$job.pid")
    fi
    [[ $pid =~ ^[1-9][0-9]*$ ]] && grep -qs smon-agent "/proc/$pid/cmdline" && printf '%s' "$pid"
}

# It has 5 s to send what is left (stop_s).
stop_agent() {
    local pid
    if systemd; then
        systemctl stop "smon-agent-job-$job.service" 2>/dev/null
        return
    fi
    pid=$(agent_pid) || return
    kill -TERM "$pid" 2>/dev/null
    for _ in {1..100}; do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null
    rm -f "$run/job-$job.pid"
}

# The folder belongs to the user, so it is the user who removes what is in it: root does not follow
# what somebody else made.
remove_spool() {
    local owner as=()
    owner=$(stat -c %u "$spool") || return
    ((EUID == 0)) && as=(setpriv --reuid "$owner" --clear-groups --no-new-privs)
    "${as[@]}" find "$spool" -mindepth 1 -delete 2>/dev/null
    rmdir "$spool" 2>/dev/null || say "$spool could not be removed"
}

# What sends the rest later: as the job's user, who owns the folder, with the group of the token.
sending() {
    local uid gid groups token_gid
    uid=$(stat -c %u "$spool") && gid=$(stat -c %g "$spool") || return
    groups=$gid
    token_gid=$(stat -c %g "$(setting token_file "")" 2>/dev/null) && ((token_gid != 0)) &&
        groups=$gid,$token_gid
    printf 'setpriv --reuid %s --regid %s --groups %s ' "$uid" "$gid" "$groups"
    printf 'env SMON_SPOOL_DIR=%s smon-agent run --config %s' "$spool" "$config"
}

finish() {
    [[ $job =~ ^[0-9]+$ && -r $config ]] || return
    local root run spool ending drain_s end
    root=$(setting spool_dir /var/spool/smon)
    run=${SMON_SLURM_RUN_DIR:-/run/smon}
    spool=$root/job-$job
    [[ $root == /* && -d $spool && -d $run ]] || return
    ending=$run/job-$job.ending
    : >"$ending" || return
    drain_s=${SMON_SLURM_DRAIN_S:-600}
    [[ $drain_s =~ ^[0-9]{1,6}$ ]] || drain_s=600
    end=$((SECONDS + drain_s))
    while waiting && agent_pid >/dev/null && ((SECONDS < end)); do
        sleep 0.5
        # The job was requeued, and its prolog wants the agent to go on.
        [[ -e $ending ]] || return
    done
    stop_agent
    if waiting || [[ -e $spool/dead || -e $spool/quarantine ]]; then
        say "left in $spool; to send it, as root: $(sending)"
    else
        remove_spool
    fi
    rm -f "$ending" "$run/job-$job.pid"
}

if [[ ${2:-} == --finish ]]; then
    echo
    exec >/dev/null
    finish
    exit 0
fi

# slurmd ends what an epilog leaves in its process group, so wait until the rest has a session of
# its own.
read -r -t 0.8 < <(exec setsid bash "${BASH_SOURCE[0]}" "$config" --finish </dev/null 2>/dev/null)
exit 0
