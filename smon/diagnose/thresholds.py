"""Every threshold of the diagnosis, in one place, with what it rests on.

Ratios are relative: 0.03 is 3 %. "Clean jobs" are synthetic windows without a fault, with 1 %
noise on each compute and 2 % on each communication, as real kernels have.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------------------- what is worth saying
#: Below this slowdown nothing is attributed (the published analyser's threshold).
ATTRIBUTION_THRESHOLD: Final = 1.03
#: A finding that costs less than this share of the step is not reported: below it no one would act.
#: The smallest cause that a person would want to see costs 2.6 % (one GPU 5.8 % slow in 96).
MIN_EXCESS_SHARE: Final = 0.01
#: Severity by excess share: below the first, a finding is information.
WARNING_SHARE: Final = 0.10
CRITICAL_SHARE: Final = 0.20
#: Critical needs so many steps; with fewer a finding is at most a warning.
CRITICAL_STEPS: Final = 20

# ---------------------------------------------------------------------------------- slow devices
#: A worker this much slower than its peers is slow. Identical healthy GPUs differ by 1–2 %.
DEVICE_RATIO: Final = 0.025
#: Among noise (uneven data), a lasting effect counts from this on, with this score. Healthy workers
#: of SE differ by up to 1.6 %, so a GPU that is 3 % slow can look like one of 1.5 %.
DEVICE_LASTING_RATIO: Final = 0.0175
DEVICE_LASTING_SCORE: Final = 5.0
#: And so many of the steps must lean its way: where noise is as large as the effect, half would.
DEVICE_LEANING_SHARE: Final = 0.65
#: A slow device is worth a line from this share of the step on: it costs more once others are well.
DEVICE_MIN_SHARE: Final = 0.0005
#: And this many standard errors away from its peers: Gaussian noise of one worker reaches 6 once
#: in 10⁹, and tails are heavier.
DEVICE_SCORE: Final = 6.0
#: Below so many steps nobody is named if their noise exceeds this: what three steps of uneven data
#: have in common is chance. In windows of 2 to 5 steps the noise of SE is 1.2 to 2.9 %, and of 43
#: such windows 4 named healthy devices; of AR, which has a slow one, it is at most 1.1 %.
DEVICE_NOISY_STEPS: Final = 6
DEVICE_NOISY_RATIO: Final = 0.0125
#: A device that is slow now and then is named from so many slow steps on, by so much, if no other
#: of its stage is ever slow. In ST a healthy worker is 2.6 to 4.2 % slow in 28 % of the steps.
DEVICE_SOME_STEPS: Final = 5
DEVICE_SOME_RATIO: Final = 0.05
#: Forward and backward of a slow GPU are slow alike: within this, or within half of each other.
SAME_RATIO: Final = 0.02
#: Nothing is known better than this (log): few steps can agree by chance.
MIN_NOISE: Final = 0.002
#: More workers than this share are no set of slow devices.
MAX_DEVICE_SHARE: Final = 0.25
#: Positions of a step that are looked at; more tell nothing new.
MAX_POSITIONS: Final = 16

#: A TP rank is the suspect of its group if it waits at most this part of what its peers wait.
TP_WAIT_RATIO: Final = 0.5
#: Links inside a node are slow if TP transfers of all its ranks take this many times the usual.
TP_COMM_RATIO: Final = 1.2

# --------------------------------------------------------------------------------------- stages
#: A stage this much longer than the others is out of balance.
STAGE_RATIO: Final = 0.05
#: And on every replica alike: spread over DP ranks of its ratio to the other stages.
STAGE_SPREAD: Final = 0.02

# ---------------------------------------------------------------------------- data that is uneven
#: Forward and backward of one microbatch are long together if the data is long …
DATA_CORRELATION: Final = 0.9
#: … and lengths spread by more than this (robust, log): below, noise of 1 % hides a correlation of
#: 0.9, and it costs next to nothing.
DATA_SPREAD: Final = 0.03
#: Stages of one replica see the same data, so their mean is less noisy; never below this, though.
DATA_SPREAD_MIN: Final = 0.025
#: Stages of one replica must agree on which microbatches are long (correlation).
STAGES_AGREE: Final = 0.8
#: A replica that is slow as a whole has long data if lengths explain this share of it; up to the
#: second, its data is acquitted.
LENGTHS_EXPLAIN: Final = 0.8
LENGTHS_SPEAK_AGAINST: Final = 0.2
#: A worker of an expert-parallel stage is loaded above this for a run of steps.
EXPERT_RATIO: Final = 0.05
#: Runs shorter than this are not slow rotation.
EXPERT_RUN: Final = 3

# ------------------------------------------------------------------------------------- counters
#: A reading within this share of what others read is as elsewhere: SM clocks move in steps of
#: 15 MHz (0.8 %), and temperatures of the GPUs of one healthy host differ by a few degrees.
COUNTER_ALIKE: Final = 0.05
#: A clock that falls below this share of what it was, against those of all others, goes with a
#: device that gets slower: two of its steps.
CLOCK_FALL: Final = 0.97

# ---------------------------------------------------------------------------------- host stalls
#: A forward this much longer than its peers, whose backward is not (below the second), was
#: interrupted on the host.
PAUSE_FORWARD: Final = 0.30
PAUSE_BACKWARD: Final = 0.10
#: A launch delay counts as a stall above this share of the step, and this much (ns).
STALL_SHARE: Final = 0.005
STALL_NS: Final = 5e6
#: A stall before the first microbatch is the data loader's if it holds this share of the delays.
LOADER_SHARE: Final = 0.8
#: A worker is late if all its stalls together are this share of those of the worst: on a busy host
#: everybody is held up for some milliseconds now and then.
LOADER_PART: Final = 0.2

#: Pauses are the allocator's if it retried in this share of them.
RETRY_SHARE: Final = 0.5

# ---------------------------------------------------------------------------------------- links
#: A group whose transfers take this much longer than those of its peers is slow.
LINK_RATIO: Final = 0.25
#: A link flaps if, in bursts of a few steps, its transfers take this many times the usual. A
#: reset of a network card lasts seconds; transfers last tens or hundreds of milliseconds.
FLAP_FACTOR: Final = 5.0

#: Slow transfers that cross one leaf switch are its congestion, if there are so many places of them
#: and it explains this share of all slow places.
CONGESTION_PLACES: Final = 3
CONGESTION_SHARE: Final = 0.8

# ------------------------------------------------------------------------------------- the whole
#: Change of step time against the job's own earlier steps that counts as job-wide, and the least
#: change of each kind of op that makes it up.
JOB_WIDE_RATIO: Final = 0.03
JOB_WIDE_OP_RATIO: Final = 0.02
#: A gap between steps is a pause if it exceeds the usual one by this many standard deviations of
#: all gaps (robust), and by this much.
PAUSE_SCORE: Final = 10.0
PAUSE_NS: Final = 20e6
#: What no cause explains is said from this share of the step on.
UNKNOWN_SHARE: Final = 0.05
#: And that launch delays are part of it, from this share on: in healthy real jobs (AR, SE, ST, four
#: runs over gloo) they add 0.5 to 1.9 %.
LATE_SHARE: Final = 0.03
#: A worker may be behind launch delays if its own, alone, cost so much of what all of them cost.
LATE_EXPLAINS: Final = 0.8
