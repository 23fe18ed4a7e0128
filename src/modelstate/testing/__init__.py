"""For tests: checkpoints that cannot be read or written, on demand, and disks that lose power."""

from modelstate.testing.disk import LossyDisk as LossyDisk
from modelstate.testing.disk import lossy_disk as lossy_disk
from modelstate.testing.faults import Faults as Faults
from modelstate.testing.faults import Request as Request
from modelstate.testing.faults import faulty_reads as faulty_reads
from modelstate.testing.faults import faulty_writes as faulty_writes
