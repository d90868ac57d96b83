"""`turnstile top --collect`: asks the agents of all hosts, round by round, and sees their ranks as one run.

A round asks every agent to look, and ends when all have answered, or after `ROUND_S` without those that have not. The
next one begins after that, so that for the ranks whose agents answered in both, one moment lies between their two
readings (`verify.live.check`), whatever the hosts' clocks say. Ranks of an agent that did not answer in a round take
no part in it: they are unknown, wait for nobody and are blamed for nothing, and a ring through them is not certain.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from kernel.errors import UsageError
from verify import words
from verify.hosts import wire
from verify.hosts.delta import Receiver
from verify.live.check import Check
from verify.live.rings import Facts, Look
from verify.readers.found import Found
from verify.top.frame import Frame, Row, frame_of

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from verify.events import Event

ROUND_S: Final = 1.0
"""For all answers to a round."""
GATHER_S: Final = 5.0
"""For the agents of the other hosts, after the first one."""
STRANGE_S: Final = 5.0
"""For whoever connects to say who it is."""
STRANGERS: Final = 64
AGENTS: Final = 4096
ROW: Final = Row(0, "unknown", "", -1, -1, None, None, "", False, None, "", None, None, 0, 0, 0, "")


class Agent:
    """A connection. known: it has shown that it knows the token. asked: the round that it has not answered yet."""

    def __init__(self, link: socket.socket, peer: str) -> None:
        self.link, self.peer = link, peer
        self.nonce = wire.nonce()
        self.known = False
        self.host, self.name = peer, ""
        self.data = bytearray()
        self.since = time.monotonic()
        self.heard = self.since
        self.asked = 0
        self.round = 0
        """The newest round that it has answered while it lasted."""
        self.state = Receiver()
        self.size = 0
        self.about = self.run = ""
        self.ended = False
        self.gone = ""


class Collector:
    """Listens at `address`; a `verify.top.frame.View`. silent_s: an agent that does not answer for so long is told of.

    Nothing runs between two looks. Raises UsageError where the address cannot be used, or the token's file.
    """

    def __init__(self, address: tuple[str, int], token_file: Path, silent_s: float) -> None:
        self.check = Check()
        self._silent_s, self._token_file = silent_s, token_file
        self._token = wire.read_token(token_file, make=True)
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._server = socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            where = f"--collect {address[0]}:{address[1]}"
            raise UsageError(f"{where}: {error.strerror}: name an address of this host") from None
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._agents: list[Agent] = []
        self._past: list[Agent] = []
        """Those that are gone, of hosts that have not come back."""
        self._round = 0
        self._refused: set[str] = set()

    @property
    def address(self) -> tuple[str, int]:
        """Where agents reach it."""
        host, port, *_ = self._server.getsockname()
        return host, port

    def announce(self) -> None:
        """Say on standard error how agents reach it."""
        host, port = self.address
        where = f"turnstile top --agent {host}:{port} --token-file {self._token_file} RUN-DIRECTORY"
        print(f"turnstile: on each host of the run: {where}", file=sys.stderr, flush=True)

    def gather(self, patience_s: float = GATHER_S) -> None:
        """Wait for an agent, and then until all ranks are told of, or for so long."""
        end = None
        while not (look := self.read()).whole and (end is None or time.monotonic() < end):
            if look.facts and end is None:
                end = time.monotonic() + patience_s
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._agents:
            with suppress(OSError):
                if agent.known and agent.ended:
                    agent.link.send(wire.line({"end": True}))
            agent.link.close()
        self._server.close()
        self._selector.close()

    # -- looking --------------------------------------------------------------------------------------------------

    def look(self) -> Frame:
        """Where all ranks stand, after one more round."""
        look = self.read()
        rows: dict[int, Row] = {}
        for agent in (*self._past, *self._agents):
            for rank, now in agent.state.ranks.items():
                row = now.row or replace(ROW, rank=rank)
                rows[rank] = row if rank in look.facts else replace(row, status="unknown", open=False, quiet_s=None)
        size = max((agent.size for agent in self._agents), default=0)
        hosts = tuple(self._silent())
        about = next((agent.about for agent in self._agents if agent.about), "")
        return frame_of(look.found.source, about, look.ended, rows, look, self.check, size, None, hosts)

    def read(self) -> Look:
        """One round: what all agents that answered in it tell."""
        self._round += 1
        self._accept_and_listen(0.0)
        for agent in [each for each in self._agents if each.known and not each.asked]:
            agent.asked = self._round
            self._send(agent, {"look": self._round})
        end = time.monotonic() + ROUND_S
        while (left := end - time.monotonic()) > 0 and any(self._awaited(agent) for agent in self._agents):
            self._accept_and_listen(left)
        for agent in list(self._agents):
            if not agent.known and time.monotonic() - agent.since > STRANGE_S:
                self._drop(agent, "it did not say who it is")
        return self._together()

    def _awaited(self, agent: Agent) -> bool:
        # One that is silent for long must not hold up every round.
        return agent.asked == self._round and time.monotonic() - agent.heard < self._silent_s

    def _together(self) -> Look:
        events: list[Event] = []
        facts: dict[int, Facts] = {}
        unsure: set[tuple[int, str]] = set()
        expected: set[int] = set()
        lost: list[int] = []
        heard = [agent for agent in self._agents if agent.known and agent.round == self._round]
        for agent in self._agents:
            expected |= set(range(agent.size))
        for agent in (*self._past, *self._agents):
            for rank, now in agent.state.ranks.items():
                expected.add(rank)
                # What an agent told when its run had ended stays true.
                if now.facts is None or not (agent in heard or (agent.ended and now.facts.ended)):
                    lost.append(rank)
                    continue
                facts[rank] = now.facts
                events += now.events()
                unsure |= {(rank, group) for group in now.unsure}
        unknown = (f"nothing is heard of the host of {words.ranks(lost)}",) if lost else ()
        names = ", ".join(dict.fromkeys(f"{agent.run} on {agent.host}" for agent in self._agents if agent.run))
        found = Found(
            names or f"{self.address[0]}:{self.address[1]}",
            events=tuple(events),
            present=frozenset(facts),
            expected=frozenset(expected),
            unknown=unknown,
            unsure=frozenset(unsure),
        )
        return Look(found, dict(sorted(facts.items())), whole=bool(facts) and not expected - facts.keys())

    def _silent(self) -> list[str]:
        now, lines = time.monotonic(), []
        for agent in self._past:
            if not agent.ended:
                lines.append(f"{agent.host}: its agent is gone ({agent.gone}): {_ranks(agent)} unknown")
        for agent in self._agents:
            if agent.known and agent.round != self._round and now - agent.heard >= self._silent_s:
                silent = f"its agent has been silent for {words.seconds(now - agent.heard)}"
                lines.append(f"{agent.host}: {silent}: {_ranks(agent)} unknown")
        if not any(agent.state.ranks for agent in (*self._past, *self._agents)):
            lines.append("no agent has told anything yet")
        return lines

    # -- connections ----------------------------------------------------------------------------------------------

    def _accept_and_listen(self, patience_s: float) -> None:
        for key, _ in self._selector.select(patience_s):
            if key.fileobj is self._server:
                for _ in range(STRANGERS):
                    if not self._accept():
                        break
            else:
                self._receive(key.data)

    def _accept(self) -> bool:
        """Take one connection; False where there is none."""
        try:
            link, peer = self._server.accept()
        except OSError:
            return False
        link.setblocking(False)
        strangers = [agent for agent in self._agents if not agent.known]
        if len(strangers) >= STRANGERS or len(self._agents) >= AGENTS:
            link.close()
            return True
        with suppress(OSError):
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        agent = Agent(link, str(peer[0]))
        self._agents.append(agent)
        self._selector.register(link, selectors.EVENT_READ, agent)
        self._send(agent, {"turnstile": wire.VERSION, "nonce": agent.nonce})
        return True

    def _receive(self, agent: Agent) -> None:
        try:
            more = agent.link.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(agent, error.strerror or str(error))
            return
        if not more:
            self._drop(agent, "it has closed the connection")
            return
        agent.data += more
        if len(agent.data) > (wire.LONGEST if agent.known else 4096):
            self._drop(agent, "it sent too long a line")
            return
        try:
            while not agent.gone and (at := agent.data.find(b"\n")) >= 0:
                one = bytes(agent.data[:at])
                del agent.data[: at + 1]
                self._take(agent, wire.parse(one))
        except wire.Malformed as error:
            self._refuse(agent, f"what it sent is no message of this version: {error}")

    def _take(self, agent: Agent, said: dict[str, Any]) -> None:
        if not agent.known:
            self._introduce(agent, said)
            return
        seen = wire.whole(said.get("seen"), "a round", 1)
        agent.run, agent.about = wire.text(said.get("run"), "a run"), wire.text(said.get("about"), "about")
        agent.size = wire.whole(said.get("size"), "a size", 0, wire.RANKS)
        agent.state.take(said)
        for other in [each for each in self._agents if each is not agent]:
            if both := sorted(other.state.ranks.keys() & agent.state.ranks.keys()):
                why = f"rank {both[0]} is told by the agent of {other.host} already: one agent a host and run"
                return self._refuse(agent, why)
            if other.size and agent.size and other.size != agent.size:
                why = f"its run has {agent.size} ranks, that of {other.host} has {other.size}: collect one run"
                return self._refuse(agent, why)
        mine = agent.state.ranks.keys()
        self._past = [old for old in self._past if not (old.state.ranks.keys() & mine)]  # it is back
        agent.heard = time.monotonic()
        if agent.asked == seen:
            agent.asked = 0
            if seen == self._round:
                agent.round = seen
        agent.ended = said.get("ended") is True
        return None

    def _introduce(self, agent: Agent, said: dict[str, Any]) -> None:
        host, theirs = wire.text(said.get("host"), "a host"), wire.text(said.get("nonce"), "a nonce")
        right = wire.proof(self._token, "agent", agent.nonce, theirs, host)
        if not hmac.compare_digest(wire.text(said.get("proof"), "a proof"), right):
            self._refuse(agent, f"wrong token: give it a copy of {self._token_file} with --token-file")
            return
        agent.known, agent.host, agent.heard = True, f"{host} ({agent.peer})", time.monotonic()
        agent.name = wire.text(said.get("agent"), "an agent's name")
        for old in [each for each in self._agents if each is not agent and each.name == agent.name]:
            self._drop(old, "it came back")  # before its old connection was known to be dead
        self._send(agent, {"proof": wire.proof(self._token, "collector", theirs, agent.nonce)})

    def _send(self, agent: Agent, message: dict[str, Any]) -> None:
        try:
            data = wire.line(message)
            if agent.link.send(data) != len(data):
                raise BlockingIOError
        except OSError as error:
            self._drop(agent, error.strerror or "it does not read")

    def _refuse(self, agent: Agent, why: str) -> None:
        """Tell it why, in its last line, and say so here, once for each host and reason."""
        with suppress(OSError):
            agent.link.send(wire.line({"error": why}))
        agent.state = Receiver()
        self._drop(agent, why)
        if (line := f"turnstile: an agent from {agent.peer} was refused: {why}") not in self._refused:
            if len(self._refused) < 1000:
                self._refused.add(line)
            print(line, file=sys.stderr, flush=True)

    def _drop(self, agent: Agent, why: str) -> None:
        if agent.gone:
            return
        agent.gone = why
        self._agents.remove(agent)
        with suppress(KeyError, ValueError):
            self._selector.unregister(agent.link)
        agent.link.close()
        if agent.state.ranks:
            self._past.append(agent)


def _ranks(agent: Agent) -> str:
    ranks = list(agent.state.ranks)
    return f"{words.ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"

