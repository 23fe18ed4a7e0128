"""Tools for tests: system calls and HTTP requests that fail on demand."""

from modelstate.testing.faults import Faults as Faults
from modelstate.testing.faults import Request as Request
from modelstate.testing.faults import faulty_reads as faulty_reads
from modelstate.testing.faults import faulty_writes as faulty_writes
from modelstate.testing.proxy import Fault as Fault
from modelstate.testing.proxy import FaultProxy as FaultProxy
from modelstate.testing.proxy import HttpRequest as HttpRequest
from modelstate.testing.proxy import fault_proxy as fault_proxy
