#!/bin/bash
# Slurm task prolog: what it prints becomes the environment of the task, so that the recorder in the
# trainer finds the spool folder that prolog.sh made, below spool_dir of /etc/smon/agent.yaml.
#
# It runs as the job's user, who must be able to read the settings. Where that is not so, it looks
# in the default folder.
set -u

config=${1:-/etc/smon/agent.yaml}
root=/var/spool/smon

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

[[ -r $config ]] && root=$(setting spool_dir "$root")
spool=$root/job-${SLURM_JOB_ID:-}
[[ $spool == /* && -d $spool ]] && printf 'export SMON_SPOOL_DIR=%s\n' "$spool"
exit 0
