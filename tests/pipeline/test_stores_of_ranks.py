"""The process that keeps the stores at which ranks of tests meet (`tests.helpers.ranks`)."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.ranks import Script


def test_it_keeps_no_pipe_of_the_tests_open() -> None:
    """A `Script` ends when its pipe does. It would wait for ever, and the tests for it, if a
    process of stores that was forked later had a copy of the tests' end."""
    script = Script()
    stores = ranks._process_of_stores.__wrapped__()
    try:
        script._connection.close()
        assert script._process.wait(timeout=60) == 0
        stores.send(None)
        port = stores.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        script._process.kill()
        stores.close()
