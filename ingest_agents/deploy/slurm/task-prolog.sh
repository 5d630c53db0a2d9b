#!/bin/bash
# Slurm task prolog: what it prints becomes the environment of the task, so that the recorder in the
# trainer finds the spool folder that prolog.sh made. The folder is spool_dir of /etc/smon/agent.yaml.
spool=/var/spool/smon/job-${SLURM_JOB_ID:-}
[[ -d $spool ]] && printf 'export SMON_SPOOL_DIR=%s\n' "$spool"
exit 0
