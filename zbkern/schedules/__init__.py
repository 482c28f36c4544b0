"""What runs, in which order: schedules as data, and every published one as a generator."""

from __future__ import annotations

from zbkern.schedules.generators import NAMES as NAMES
from zbkern.schedules.generators import check_counts as check_counts
from zbkern.schedules.generators import dualpipe_v as dualpipe_v
from zbkern.schedules.generators import gpipe as gpipe
from zbkern.schedules.generators import interleaved as interleaved
from zbkern.schedules.generators import interleaved_zero_bubble as interleaved_zero_bubble
from zbkern.schedules.generators import one_f_one_b as one_f_one_b
from zbkern.schedules.generators import one_f_one_b_v as one_f_one_b_v
from zbkern.schedules.generators import v_half as v_half
from zbkern.schedules.generators import v_min as v_min
from zbkern.schedules.generators import zb_h1 as zb_h1
from zbkern.schedules.generators import zb_h2 as zb_h2
from zbkern.schedules.generators import zb_v as zb_v
