"""Do several engines that are met at the same moment, by a process that has met nobody, leave it alive?"""

import subprocess
import sys

# Each thread does what a meeting decodes; the interpreter changes threads as often as it can.
SCRIPT = """
import sys, threading
sys.setswitchinterval(1e-6)
from kvreshard.session.engine_metadata import RankMetadata, decode_engine_metadata, encode_engine_metadata, make_engine_metadata
from kvreshard.session.handshake_messages import read_answer
from tests.pairs.small import engine
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.regions import RegionTable, decode_metadata, encode_metadata

metadata = encode_metadata("nixl", "peer", RegionTable([MemoryRegion(4096, 4096)]))
encoded = encode_engine_metadata(make_engine_metadata(engine("prefill"), bytes(32), {}, [RankMetadata(0, metadata, 4096, 512)], 30.0))
barrier, done = threading.Barrier(8), []

def meet():
    barrier.wait()
    found = decode_engine_metadata(encoded)
    found.decode_layout()
    decode_metadata("nixl", found.ranks[0].transport_metadata)
    read_answer(encoded)
    done.append(found)

threads = [threading.Thread(target=meet) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(done) != 8)
"""
TRIES = 6


def test_the_first_meetings_of_a_process_may_be_at_once() -> None:
    """Without the lock of `session.engine_metadata` this ended in a segmentation fault 7 times in 10."""
    for _ in range(TRIES):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
