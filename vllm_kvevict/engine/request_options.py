"""What one request asks for, read once in the front-end, and the names of all fields. Owns nothing.

A request's fields (``vllm_xargs``), the server's options and what was found in its chat become :class:`RequestOptions`.
These travel to the scheduler in place of the fields, so nothing is checked there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from vllm_kvevict.engine import read
from vllm_kvevict.engine.config import LONG, SCOPE_FLAG, Options, check_parts
from vllm_kvevict.engine.errors import KVEvictionError, refused
from vllm_kvevict.engine.parameters import ANY_BUDGET, known_config, overridden, parameters_of_request
from vllm_kvevict.policies import EvictionConfig, available
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import can_look_ahead, lookahead_policies, plan_of_parts
from vllm_kvevict.schedules.repeat_prompts import MOST_EXTRA_ROWS, RepeatPrompts

POLICY, BUDGET, PARAMS = "kv_eviction", "kv_budget", "kv_params"
PREFIX_LEN, TURNS = "kv_prefix_len", "kv_turns"
DECODE_BUDGET, ANSWER_FROM, LOOKAHEAD = "kv_decode_budget", "kv_answer_from", "kv_lookahead"
REQUEST_FIELDS = (POLICY, BUDGET, PARAMS, PREFIX_LEN, TURNS, DECODE_BUDGET, ANSWER_FROM, LOOKAHEAD)
"""Fields of ``vllm_xargs`` that a request may carry."""

RENDERED = "kv_rendered"
"""The field for :class:`Rendered`, which only routes that render write; it comes back by way of the client."""

RESOLVED = "kv_resolved"
"""The entry of ``extra_args`` that replaces all of these; clients cannot send it."""

CHAT = "kv_chat"
"""The entry of a rendered prompt for :class:`ChatFacts`."""

TRANSFER = "kv_transfer_params"
OTHERS_FIELDS = (TRANSFER, "kv_cache_report_mode")
"""Fields that begin like ours and are vLLM's."""

SCOPE_FIELDS = {"prefix": (PREFIX_LEN, "the question"), "turns": (TURNS, "the ends of turns")}
"""By scope, the field that says where a request is evicted, and what the front-end looks for in chats."""

MOST_TURNS = 8192
"""Of a request: work and memory grow with them, and no chat has as many (what the front-end finds is below 6400)."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=read.MOST_TOKENS)]


class Rendered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What only who renders a chat knows.

    Attributes:
        lasting: tokens of the turns that stay the same when the chat goes on; None for all.
        whole: tokens before the first user message, where these stay whole; 0 for none.
        repeat: what asks the model to repeat the prompt, if it will.
    """

    lasting: Tokens | None = None
    whole: Tokens = 0
    repeat: RepeatPrompts | None = None


NOTHING = Rendered()


@dataclass
class ChatFacts:
    """What the front-end has found out about a prompt.

    Attributes:
        chat: what it was rendered from (``frontend/chat.py``), None if it is no chat.
        ends: numbers of tokens after which it is evicted in its server's scope; None if these were not found.
        missing: why not, if they were looked for.
        lasting, whole: as of :class:`Rendered`.
        changes: whether its template writes something else each time.
        last_read: the SamplingParams of the request that was checked last, and what was read; who changes these before
            the engine gets the request is not checked again.
    """

    chat: Any = None
    ends: list[int] | None = None
    missing: str | None = None
    lasting: int | None = None
    whole: int = 0
    changes: bool = False
    last_read: tuple[Any, Any] | None = None


def facts_of(prompt: Any) -> ChatFacts:
    """What was found out about a prompt; what is found later stays with it if vLLM has rendered it for its engine."""
    if isinstance(prompt, dict) and "type" in prompt:
        facts: ChatFacts = prompt.setdefault(CHAT, ChatFacts())
        return facts
    return ChatFacts()


@dataclass(frozen=True)
class RequestOptions:
    """How one request is evicted.

    Attributes:
        config: its policy.
        ends: numbers of tokens after which its prompt is evicted; None for all of them.
        in_turns: whether these end turns; else there is one, that of a prefix.
        decode_budget: entries of its answer that each KV head keeps on average; 0: all.
        answer_from: tokens of the prompt before those that count as an answer; None for all.
        lookahead: tokens of the answer that are stored before the prompt is evicted.
        by_scope: whether the server's scope says what is evicted of a chat.
    """

    config: EvictionConfig
    ends: tuple[int, ...] | None = None
    in_turns: bool = False
    decode_budget: int = 0
    answer_from: int | None = None
    lookahead: int = 0
    rendered: Rendered = NOTHING
    by_scope: bool = field(default=False, compare=False)

    @classmethod
    def read(
        cls,
        server: Options,
        fields: Mapping[str, Any] | None,
        prompt_len: int,
        chat: ChatFacts | None = None,
        most_output: int | None = None,
    ) -> "RequestOptions":
        """Check one request's ``vllm_xargs``, and add what the server's scope asks for.

        Args:
            prompt_len: tokens of the prompt.
            chat: what was found about it; None where the scope does not matter.
            most_output: tokens that the answer may have.

        Raises:
            KVEvictionError: one sentence naming the field.
        """
        fields = fields or {}
        check_names(fields)
        rendered, config = _rendered(fields), _config(server, fields)
        ends, in_turns = _ends(fields, prompt_len, config)
        first = read.whole(ANSWER_FROM, fields[ANSWER_FROM]) if ANSWER_FROM in fields else None
        budget, ahead = _decode_budget(server, fields), _lookahead(server, fields, config.policy, ends)
        options = cls(config, ends, in_turns, budget, first, ahead, rendered)
        is_open = ends is None and server.scope != "prompt" and server.evicts(config, first or prompt_len)
        if is_open and chat is not None:
            options = options._in_scope(server, chat, most_output)
        options._check_ends(prompt_len)
        if most_output is not None and options._ends_before_eviction(server, prompt_len, most_output):
            return replace(options, config=KEEPS_ALL.config, lookahead=0)
        if server.evicts(config, first or prompt_len):
            _check_evicted_before(server, fields, budget, ahead)
        return options

    def _in_scope(self, server: Options, chat: ChatFacts, most_output: int | None) -> "RequestOptions":
        """The same for a request that does not say itself where it is evicted."""
        # For one token nothing has to be evicted: its KV is gone at once.
        if chat.ends is None and most_output != 1:
            name, found = SCOPE_FIELDS[server.scope]
            reason = chat.missing or (
                f"the server has not rendered this prompt as a chat, so it cannot find {found} (if another process "
                "has, that one needs the same --kv-eviction flags)"
            )
            raise refused(name, f"is required with {SCOPE_FLAG} {server.scope}: {reason}")
        if not chat.ends:
            return replace(self, config=KEEPS_ALL.config, by_scope=True)
        in_turns = server.scope == "turns"
        if in_turns:
            check_parts(self.config.policy, self.config.budget, TURNS, TURNS)
        rendered = Rendered(chat.lasting, chat.whole if server.keep_first else 0, self.rendered.repeat)
        return replace(self, ends=tuple(chat.ends), in_turns=in_turns, rendered=rendered, by_scope=True)

    def _ends_before_eviction(self, server: Options, prompt_len: int, most_output: int) -> bool:
        """Whether its answer has too few tokens for its lookahead; the last one is not stored."""
        begins = prompt_len if self.answer_from is None else self.answer_from
        is_short = prompt_len + most_output - 1 <= begins + self.lookahead
        return bool(self.lookahead) and is_short and server.evicts(self.config, begins)

    def _check_ends(self, prompt_len: int) -> None:
        """Refuse an answer that begins, or tokens that stay whole, where the prompt's parts forbid it."""
        first, ends, whole = self.answer_from, self.ends or (), self.rendered.whole
        if first is not None and not self.decode_budget and not self.lookahead:
            words = (
                f"says where an answer begins, which takes a {DECODE_BUDGET}, or a {LOOKAHEAD} with a policy that "
                "can have one"
            )
            raise refused(ANSWER_FROM, words)
        if first is not None and not max(ends, default=1) <= first <= prompt_len:
            least = f"{PREFIX_LEN} ({ends[-1]})" if ends else "1"
            words = f"must be from {least} to the length of the prompt, {prompt_len} tokens, got {first}"
            raise refused(ANSWER_FROM, words)
        if self.in_turns and whole and whole not in ends:
            raise not_written(f"whole must be one of {TURNS}, {list(ends)}, got {whole}")

    def plan(self, server: Options, prompt_len: int) -> Plan:
        """Decide whether, where and how a prompt of ``prompt_len`` tokens and its answer are evicted.

        Raises:
            KVEvictionError: one sentence naming the field; never once a plan of the same was made.
        """
        begins = prompt_len if self.answer_from is None else self.answer_from
        budget, ends = self.decode_budget, self.ends
        answer = server.decoding.phase(budget, begins, DECODE_BUDGET) if budget else None
        if not self.in_turns or ends is None:
            return server.plan_with(self.config, ends[-1] if ends else begins, answer, self.lookahead)
        whole = self.rendered.whole
        if whole < server.page_size or not self.config.evicts(LONG):
            # They fill no page that others could share, or no part is evicted.
            whole = 0
        return plan_of_parts(self.config, ends, server.least_turn, answer, whole)

    def asking(self, repeat: RepeatPrompts) -> "RequestOptions":
        """The same with what asks the model to repeat the prompt."""
        return replace(self, rendered=msgspec.structs.replace(self.rendered, repeat=repeat))

    def changes_later(self, tokens: int) -> bool:
        """Whether so many tokens at the prompt's front will be others when its chat goes on."""
        return self.rendered.lasting is not None and tokens > self.rendered.lasting

    def to_fields(self, fields: Mapping[str, Any] | None) -> dict[str, Any]:
        """The fields by which an engine reads the same of the chat's tokens alone.

        Args:
            fields: of the request, from which these were read.
        """
        found: dict[str, Any] = dict(fields or {})
        if self.by_scope and self.config == KEEPS_ALL.config:
            # Keeping everything takes no parameters.
            found = {name: value for name, value in found.items() if name != PARAMS} | {POLICY: "full"}
        if self.ends is not None:
            found |= {TURNS: list(self.ends)} if self.in_turns else {PREFIX_LEN: self.ends[0]}
        if self.rendered != NOTHING:
            found[RENDERED] = msgspec.to_builtins(self.rendered)
        return found

    def to_extra_args(self, fields: Mapping[str, Any] | None) -> dict[str, Any]:
        """A request's ``extra_args`` with these in place of its fields, in a form that travels between processes."""
        others = {name: value for name, value in (fields or {}).items() if name not in _OURS}
        return {**others, RESOLVED: msgspec.to_builtins(self)}

    @classmethod
    def of(cls, params: Any) -> "RequestOptions":
        """Those that the front-end has read; of a request that did not pass it, which keeps all, others.

        Args:
            params: the request's SamplingParams, or None.
        """
        found = ((params.extra_args if params else None) or {}).get(RESOLVED)
        return KEEPS_ALL if found is None else msgspec.convert(found, cls)


_OURS = {*REQUEST_FIELDS, RENDERED}
KEEPS_ALL = RequestOptions(EvictionConfig("full"))


def plan_for(
    server: Options,
    prompt_len: int,
    fields: Mapping[str, Any] | None = None,
    most_output: int | None = None,
) -> Plan:
    """Read a request's fields and make its plan, whatever the server's scope is.

    Args:
        most_output: tokens that the answer may have; None for more than any lookahead.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    read_options = RequestOptions.read(server, fields, prompt_len, most_output=most_output)
    return read_options.plan(server, prompt_len)


def check_names(fields: Mapping[str, Any]) -> None:
    """Refuse fields of ``vllm_xargs`` that begin like ours and are not, and one of vLLM's that it would fail by later.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    for name in fields:
        if name.startswith("kv_") and name not in (*_OURS, *OTHERS_FIELDS):
            raise refused(name, f"is unknown (valid: {', '.join(REQUEST_FIELDS)})")
    given = fields.get(TRANSFER)
    if given is not None and not isinstance(given, dict):
        raise refused(TRANSFER, f"must be an object, got {given!r}")


def _rendered(fields: Mapping[str, Any]) -> Rendered:
    """What a route that renders has found; it comes by way of the client, so nothing of it can be relied on."""
    try:
        rendered = msgspec.convert(fields.get(RENDERED, {}), Rendered)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise not_written(str(error)) from None
    if rendered.repeat is not None and rendered.repeat.overhead > MOST_EXTRA_ROWS:
        raise not_written(f"repeat may add at most {MOST_EXTRA_ROWS} tokens to a chunk")
    return rendered


def not_written(reason: str) -> KVEvictionError:
    """What is said of a field that clients have changed."""
    return refused(RENDERED, f"must be what a render route wrote: {reason}")


def _config(server: Options, fields: Mapping[str, Any]) -> EvictionConfig:
    """A request's policy.

    Parameters that it does not give are those that the server has for the policy that it names, and the policy's
    defaults, of the server's kind; the budget is inherited unless given.
    """
    policy = fields.get(POLICY, server.policy)
    _check_allowed(server, policy)
    budget = read.budget(fields[BUDGET], BUDGET) if BUDGET in fields else server.budget
    params = _params(server, policy, fields)
    try:
        return known_config(policy, budget, params, server.defaults)
    except ValueError as error:
        named = next((name for name in (BUDGET, PARAMS) if name in fields), POLICY)
        raise KVEvictionError(f"{named}: {error}", named) from None


def _params(server: Options, policy: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The server's parameters of a policy, with those of the request in their place."""
    if PARAMS not in fields:
        return server.params_of(policy)
    try:
        given = parameters_of_request(policy, fields[PARAMS], server.most_window)
        params = overridden(policy, server.params_of(policy), given)
        known_config(policy, ANY_BUDGET, params, server.defaults)
    except ValueError as error:
        raise KVEvictionError(f"{PARAMS}: {error}", PARAMS) from None
    return params


def _check_allowed(server: Options, policy: Any) -> None:
    """Refuse a policy that there is not, or that requests may not name."""
    if policy not in available():
        raise KVEvictionError(
            f"{POLICY}: unknown policy {policy!r} (choose from {', '.join(available())})", POLICY
        )
    if not server.allows(policy):
        raise KVEvictionError(
            f"{POLICY}: requests may not choose {policy} on this server (--kv-eviction-config.policies "
            f"{read.listed(server.policies)}): start it with --kv-eviction-config.policies {read.ALL}, or with a list "
            f"that names {policy}",
            POLICY,
        )


def _ends(
    fields: Mapping[str, Any], prompt_len: int, config: EvictionConfig
) -> tuple[tuple[int, ...] | None, bool]:
    """Where a request says that it is evicted, None if it does not, and whether turns end there."""
    found = fields.get(PREFIX_LEN)
    prefix = None if found is None else (read.whole(PREFIX_LEN, found),)
    name, ends = (TURNS, _turns(fields[TURNS])) if TURNS in fields else (PREFIX_LEN, prefix)
    if ends is not None and ends[-1] > prompt_len:
        raise refused(name, f"must not exceed the length of the prompt, {prompt_len} tokens, got {ends[-1]}")
    if TURNS in fields:
        if prefix is not None:
            raise refused(TURNS, f"cannot be given together with {PREFIX_LEN}")
        check_parts(config.policy, config.budget, TURNS, TURNS)
    return ends, TURNS in fields


def _turns(given: Any) -> tuple[int, ...]:
    """The numbers of tokens after which turns end."""
    if not isinstance(given, list) or not given:
        raise refused(TURNS, f"must be a list of token counts, got {given!r}")
    if len(given) > MOST_TURNS:
        raise refused(TURNS, f"must have at most {MOST_TURNS} entries, got {len(given)}")
    ends = tuple(read.whole(TURNS, end) for end in given)
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise refused(TURNS, f"must be strictly ascending, got {given!r}")
    return ends


def _lookahead(server: Options, fields: Mapping[str, Any], policy: str, ends: tuple[int, ...] | None) -> int:
    """Tokens of a request's answer that are stored before its prompt is evicted."""
    is_able = can_look_ahead(policy)
    if LOOKAHEAD not in fields:
        return server.lookahead if is_able and ends is None else 0
    ahead = read.lookahead(LOOKAHEAD, fields[LOOKAHEAD])
    if ahead and not server.lookahead:
        words = "needs a server that was started with --kv-eviction-config.lookahead, which sets memory aside for it"
        raise refused(LOOKAHEAD, words)
    if ahead > server.lookahead:
        raise refused(
            LOOKAHEAD,
            f"must be at most {server.lookahead}, the server's --kv-eviction-config.lookahead, which sets memory aside "
            f"for it, got {ahead}",
        )
    if ahead and ends is not None:
        raise refused(LOOKAHEAD, f"cannot be given together with {PREFIX_LEN} or {TURNS}")
    if ahead and not is_able:
        able = ", ".join(lookahead_policies())
        raise refused(LOOKAHEAD, f"cannot be used with policy {policy} (choose from {able})")
    return ahead


def _check_evicted_before(server: Options, fields: Mapping[str, Any], budget: int, ahead: int) -> None:
    """Refuse an answer that would be evicted before its prompt is."""
    if not (budget and ahead):
        return
    most = server.decoding.phase(budget, 1, DECODE_BUDGET).most_lookahead
    if ahead <= most:
        return
    if LOOKAHEAD in fields:
        raise refused(LOOKAHEAD, f"must be at most {most} with a {DECODE_BUDGET} of {budget}, got {ahead}")
    words = f"of {budget} needs a {LOOKAHEAD} of at most {most}, but the server's is {ahead}: give both, or raise it"
    raise refused(DECODE_BUDGET, words)


def _decode_budget(server: Options, fields: Mapping[str, Any]) -> int:
    """The budget of a request's answer, 0 where it is kept."""
    most, policy = server.decoding.budget, server.decoding.policy
    if DECODE_BUDGET not in fields:
        return most
    budget = read.whole(DECODE_BUDGET, fields[DECODE_BUDGET], least=0)
    if budget and not most:
        words = "needs a server that was started with --kv-decode-budget, which sets memory aside for it"
        raise refused(DECODE_BUDGET, words)
    if budget > most and lookup(policy).compares_entries:
        raise refused(
            DECODE_BUDGET,
            f"must be at most {most}, the server's --kv-decode-budget: its policy {policy} compares every entry with "
            f"every other, got {budget}",
        )
    return budget
