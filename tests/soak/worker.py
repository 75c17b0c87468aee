"""What does an engine's process do? It serves a router's words over a pipe until it is told to end, or is killed.

Words come in and go out as tuples, the first part being what is meant. In: `prefill`, `load`, `compute`, `follow`, `abort`, `release`,
`count`, `end`. Out: `born`, `offered`, `ended`, `counted`. `compute` and `follow` are the two sides of an early request, sent at once.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
from multiprocessing.connection import Connection
from typing import Any

from tests.soak.decode import Loads
from tests.soak.early import EarlyPrefills
from tests.soak.engine import Engine
from tests.soak.follow import Follows
from tests.soak.prefill import Prefills
from tests.soak.shapes import SHAPES

from kvreshard.session.commands import EndpointOptions

REST_S = 0.003


def serve(pipe: Connection, name: str, options: EndpointOptions, seed: int, port: int, log: str) -> None:
    """The process."""
    logging.basicConfig(filename=log, level=logging.WARNING, format=f"%(asctime)s {name} %(message)s")
    with open(log, "a") as file:
        os.dup2(file.fileno(), 2)  # NIXL's own complaints too
    faulthandler.enable()
    shape = next(shape for shape in SHAPES if shape.name == name)
    engine = Engine(shape, options, random.Random(seed), port)
    worker = _Worker(pipe, engine)
    pipe.send(("born", engine.listener.address.port, os.getpid()))
    try:
        while not worker.is_over:
            worker.turn()
    except (EOFError, ConnectionError):  # the router has gone
        pass
    finally:
        worker.close()
        engine.close()
    pipe.close()


class _Worker:
    def __init__(self, pipe: Connection, engine: Engine) -> None:
        self._pipe, self._engine = pipe, engine
        self._prefills, self._loads = Prefills(engine), Loads(engine)
        self._early = EarlyPrefills(engine, self._prefills)
        self._follows = Follows(engine, self._loads, lambda request: pipe.send(("offered", request, None)))
        self.is_over = False

    def turn(self) -> None:
        """Obey what was said, tell what has ended."""
        rest_s = REST_S
        while not self.is_over and self._pipe.poll(rest_s):
            rest_s = 0.0
            self._obey(*self._pipe.recv())
        results = self._engine.collect()
        self._early.turn(self._prefills.collect(results))
        for ended in [*self._loads.collect(results), *self._follows.turn()]:
            self._pipe.send(("ended", ended))

    def close(self) -> None:
        """End all questions."""
        self._follows.close()

    def _obey(self, word: str, *parts: Any) -> None:
        match word:
            case "prefill":
                request, num_tokens, seed, ttl_s, is_revoked = parts
                params = self._prefills.begin(request, num_tokens, seed, ttl_s, is_revoked)
                self._pipe.send(("offered", request, params))
            case "load":
                request, params, prefix, is_watched = parts
                if not self._loads.begin(request, params, prefix, is_watched):
                    self._loads.release(params)
                    self._pipe.send(("offered", request, None))
            case "compute":
                self._early.begin(*parts)
            case "follow":
                self._follows.begin(*parts)
            case "abort":
                self._loads.abort(*parts)
                for ended in self._follows.abort(*parts):
                    self._pipe.send(("ended", ended))
            case "release":
                self._loads.release(*parts)
            case "count":
                live = (
                    len(self._prefills), len(self._early), len(self._loads), len(self._follows),
                    self._loads.num_quarantined,
                )  # fmt: skip
                num_pages = self._prefills.num_pages + self._early.num_pages + self._loads.num_pages
                self._pipe.send(("counted", self._engine.count(num_pages), live, dict(self._prefills.causes)))
            case "end":
                self.is_over = True
