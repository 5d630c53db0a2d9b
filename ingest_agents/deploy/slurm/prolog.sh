#!/bin/bash
# Slurm prolog: gives the job a spool folder on this node and starts an agent that ships it.
# In slurm.conf: Prolog=.../prolog.sh, Epilog=.../epilog.sh, TaskProlog=.../task-prolog.sh,
# PrologFlags=Alloc. Settings: /etc/smon/agent.yaml, or the file that is the first argument.
#
# It runs as root and never holds a job up: a prolog that fails drains the node, so this one always
# succeeds, after a second at most, and says in the system log what went wrong. The agent runs as
# the job's user, who owns the spool.
set -u

config=${1:-/etc/smon/agent.yaml}
job=${SLURM_JOB_ID:-}

say() {
    logger -t smon-prolog -- "job ${job:-?}: $*" 2>/dev/null ||
        printf 'smon-prolog: job %s: %s\n' "${job:-?}" "$*" >&2
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

start() {
    [[ $job =~ ^[0-9]+$ ]] || { say "SLURM_JOB_ID is no number: no agent"; return; }
    [[ -r $config ]] || { say "$config cannot be read: no agent"; return; }
    local agent root run spool uid gid token_file token_gid groups
    agent=$(command -v smon-agent || echo /opt/smon/bin/smon-agent)
    [[ -x $agent ]] || { say "$agent is missing: no agent"; return; }
    root=$(setting spool_dir /var/spool/smon)
    [[ $root == /* ]] || { say "spool_dir must begin with a slash: no agent"; return; }
    run=${SMON_SLURM_RUN_DIR:-/run/smon}
    spool=$root/job-$job
    uid=${SLURM_JOB_UID:-$(id -u)}
    gid=$(id -g "$uid" 2>/dev/null) || { say "there is no user $uid: no agent"; return; }
    # The user may not read the token; the agent may, through the group that owns its file.
    token_file=$(setting token_file "")
    groups=$gid
    if [[ -n $token_file ]]; then
        token_gid=$(stat -c %g "$token_file" 2>/dev/null) ||
            { say "$token_file is missing: no agent"; return; }
        ((token_gid == 0)) || groups=$gid,$token_gid
    fi

    if ! { install -d -m 0755 "$root" && install -d -m 0700 "$run" &&
        install -d -m 0700 -o "$uid" -g "$gid" "$spool"; }; then
        say "cannot make $spool: no agent"
        return
    fi
    # Of a requeued job, the agent of the last try may still be shipping: it ships this one too.
    rm -f "$run/job-$job.ending"
    if [[ -s $run/job-$job.pid ]] && kill -0 "$(<"$run/job-$job.pid")" 2>/dev/null; then
        return
    fi
    launch
}

# Whether systemd runs this machine.
systemd() {
    [[ -d ${SMON_SLURM_SYSTEMD:-/run/systemd/system} ]] && command -v systemd-run >/dev/null
}

# Caps as in smon-agent.service, by systemd where it runs; without it by what a shell can do.
launch() {
    if systemd; then
        systemctl is-active --quiet "smon-agent-job-$job.service" && return
        systemd-run --quiet --no-block --collect --unit="smon-agent-job-$job" \
            --description="SMon agent of job $job" --uid="$uid" --gid="$gid" \
            --property="SupplementaryGroups=${groups//,/ }" \
            --setenv=SMON_AGENT_CONFIG="$config" --setenv=SMON_SPOOL_DIR="$spool" \
            --property=Restart=on-failure --property=RestartSec=5 --property=TimeoutStopSec=15 \
            --property=CPUQuota=10% --property=MemoryMax=256M --property=TasksMax=32 \
            --property=Nice=19 --property=IOSchedulingClass=idle \
            --property=OOMScoreAdjust=1000 --property=NoNewPrivileges=yes \
            "$agent" run ||
            say "systemd-run failed: no agent"
        return
    fi
    local as=()
    ((EUID == 0)) && as=(setpriv --reuid "$uid" --regid "$gid" --groups "$groups" --no-new-privs)
    (
        cd / || exit
        echo 1000 >/proc/self/oom_score_adj
        exec env -i PATH="$PATH" SMON_AGENT_CONFIG="$config" SMON_SPOOL_DIR="$spool" \
            nice -n 19 ionice -c 3 "${as[@]}" "$agent" run
    ) </dev/null > >(exec logger -t smon-agent 2>/dev/null) 2>&1 &
    printf '%s\n' "$!" >"$run/job-$job.pid"
}

if [[ ${2:-} == --start ]]; then
    start
    echo
    exit 0
fi

# slurmd ends what a prolog leaves in its process group and waits for its output: hence a session of
# its own, without that output. Whatever hangs in there (a disk, a name server), the job begins.
read -r -t 0.8 < <(exec setsid bash "${BASH_SOURCE[0]}" "$config" --start </dev/null 2>/dev/null)
(($? > 128)) && say "still starting after 0.8 s: the job goes on without waiting"
exit 0
