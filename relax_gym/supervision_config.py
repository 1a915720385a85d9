"""`[supervision]` and `[timeline]`: how long a run waits, and how much it says of its times."""

from __future__ import annotations

from pydantic import Field

from relax_gym.section import Section


class SupervisionConfig(Section):
    """`[supervision]`: seconds that the loop waits for one thing before the run ends and says what was stuck."""

    start: float = Field(3600, gt=0, description="the sampler's start, or the loading of a checkpoint")
    rollout: float = Field(7200, gt=0, description="a step's next groups, the end of aborted ones, or an evaluation")
    learner: float = Field(3600, gt=0, description="a step of the learner, or what it prepares for it")
    publish: float = Field(1800, gt=0, description="new weights for the sampler, or the memory that it frees")
    checkpoint: float = Field(3600, gt=0, description="the writing of a checkpoint")
    close: float = Field(120, gt=0, description="the end of each part, once the run has failed or is over")
    loop: float = Field(600, gt=0, description="a blocking call in the event loop")


class TimelineConfig(Section):
    """`[timeline]`: `timeline.json` of the run folder, which Perfetto opens."""

    max_mib: float = Field(64.0, ge=0, description="of timelines that are kept, the newest half at least; 0: none")
