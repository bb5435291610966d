"""The embedded engine: continuous batching in torch, in preallocated KV memory.

On a GPU a call of `step` makes its decode steps without waiting for the device, and reads it once.
Their shapes are fixed, so that each is one CUDA graph after its first time.

Rows 0..n-1 are in use. A finished row stays, ignored, until a chunk of waiting requests takes the
free rows, or until few rows are live and the engine compacts them. The last prompt token is a row's
first decode input, so that admission only has to encode the rest of each prompt, once per group.

Where samples are sessions, keys and values of prompts and responses outlive their rows in separate
blocks (`decoder.PrefixCache`) until the next weights. A prompt that begins with tokens encoded or
sampled under these weights is encoded only behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, from_numpy, int64, zeros
from torch.nn.functional import pad

from actors import decoder
from actors.decoder import RoutedLayers
from actors.decoding import constraints
from actors.decoding.drafts import DraftBook, DraftPolicy
from actors.engine import (
    Completion,
    CompletionRequest,
    Engine,
    EngineRow,
    Key,
    PromptScores,
    RowEngine,
    TokenCounts,
    draw_uniform_rows,
    score_states,
)
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.models import exact_operators, memory, router_hooks
from asyncrl.models.adapters import AdapterBase
from asyncrl.models.policy import LazyWeights, PolicyModel, load_policy
from asyncrl.models.trainer import split_by_length
from asyncrl.models.weight_rounding import WeightRounder
from asyncrl.records import machine_memory

TokenRows = list[ndarray]

NO_COLUMNS = np.empty(0, np.int64)
CHUNK = 64  # rows refilled at a time: an admission costs about as much as a few decode steps
TOGETHER = 1 << 15  # prompt tokens encoded in one batch
BRIEF = 64  # columns of the cache in which the cost of drafts is measured
SHRINK = 0.75  # compact when a smaller share of the rows in use is live
SEEN = 256  # columns of the cache by which the shapes of a GPU's steps grow


@dataclass
class EmbeddedRow(EngineRow):
    """A live row of the embedded engine.

    born: the step of its first decode input.
    loads: the engine's load count when all its keys were computed.
    """

    born: int = 0
    loads: int = 0


class EmbeddedEngine(RowEngine):
    """See `actors.engine.RowEngine`.

    fixed: use the operators of exact mode (asyncrl/models/exact_operators.py), with every key at
    the column of its position. mantissa_bits: weights are rounded to so many bits when loaded; 0
    means no rounding. quantize: the format to which the linear layers' weights are rounded instead,
    or "none". kept_tokens: the most tokens whose keys and values are kept for later prompts. 0
    keeps none, and neither does exact mode, which encodes every prompt in full, as the learner
    does. record_routing: completions of a mixture of experts carry the experts of their tokens.
    drafts: when to decode speculatively; None: never.
    """

    rows: dict[int, EmbeddedRow]

    def __init__(
        self,
        model: PolicyModel,
        *,
        slots: int,
        context: int,
        in_flight: str = "keep_kv",
        max_new_tokens: int = 64,
        fixed: bool = False,
        mantissa_bits: int = 0,
        quantize: str = "none",
        base: AdapterBase | None = None,
        kept_tokens: int = 0,
        record_routing: bool = False,
        drafts: DraftPolicy | None = None,
    ) -> None:
        assert model.fast is not None
        routing = model.fast.routing if record_routing else None
        super().__init__(slots, context, in_flight, base, routing)
        self.lay = model.fast
        self.mantissa_bits = mantissa_bits
        self.rounder = None if quantize == "none" else WeightRounder(model.hf, quantize)
        positions = exact_operators.round_up(context + 1, exact_operators.KEYS)
        self.weights = decoder.FusedWeights(model.fast, positions, exact=fixed)
        self.fixed = fixed
        self.drafts = drafts
        self.draft_book = DraftBook()
        self.proposed = self.accepted = 0  # draft tokens
        self.dtype, self.device = self.weights.dtype, self.weights.device
        self.on_cpu = self.device.type == "cpu"
        # the keys of position p are in column p
        self.by_position = fixed or drafts is not None or not self.on_cpu
        # (rows, columns, plain, cuts) -> the step, captured; None: made once
        self.graphs: dict[tuple[int, int, bool, bool], Callable[[], Tensor | None] | None] = {}
        if (needed_bytes := self._compute_bytes(1, context, context)) > get_free_bytes(self.device):
            raise ConfigError(
                f"generator.context = {context}: one response of that length takes "
                f"{format_gb(needed_bytes)}, and {format_gb(get_free_bytes(self.device))} are "
                "free; set a lower context or add memory"
            )
        self.cache = self._make_cache(slots, 0)
        self.prompt_needed = 8
        self.used = 0  # rows that a step computes, of which ended ones are not live
        self.clock = 0  # decode steps since the engine was last empty
        self.columns = decoder.StepColumns(max_new_tokens)
        self.loads = 0
        self.prefix_cache = (
            decoder.PrefixCache(kept_tokens, self.cache.k, self.routing)
            if kept_tokens and not fixed
            else None
        )
        self.hits = self.reused = self.encoded = 0  # prompts with kept keys; tokens
        # `remaining`: tokens that may still be sampled. 0: the row is not live; -1 - n: its
        # completion is over. `count`: tokens sampled
        self.integers = zeros(5, slots, dtype=int64, device=self.device)
        self.token, self.position, self.remaining, self.count, self.top_k = self.integers
        self.floats = torch.ones(2, slots, device=self.device)
        self.scale, self.top_p = self.floats
        self.cuts = False  # some live row has top-p or top-k
        self.plain = True  # every live row has temperature 1, no cut and no grammar
        self.stop = torch.full((slots, 1), -1, dtype=int64, device=self.device)
        # an ended row reads and writes behind its last token, with a draft several
        width = max_new_tokens + 1 + (0 if drafts is None else drafts.draft_tokens)
        self.uniform = zeros(slots, width, device=self.device)
        self.out_token = zeros(slots, width, dtype=int64, device=self.device)
        self.out_logprob = zeros(slots, width, device=self.device)
        # the experts of the token that each step read
        self.out_routed: Tensor | None = None
        if self.routing is not None:
            size = (slots, width, self.routing.layers, self.routing.chosen)
            kind = torch.uint8 if self.routing.experts < 256 else torch.int16
            self.out_routed = zeros(size, dtype=kind, device=self.device)

    # ---- the protocol ----------------------------------------------------------------------------

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        lay = self.lay
        numbers: int = 2 * self.weights.layers * lay.kv_heads * lay.head_dim
        return numbers * int(self.dtype.itemsize)

    def _compute_bytes(self, rows: int, columns: int, prompt: int) -> int:
        """Compute the bytes of a cache, plus those of encoding `prompt` tokens."""
        config = self.lay.hf.config
        states: int = 4 * config.hidden_size + 3 * config.intermediate_size
        encoding = prompt * (self.token_bytes + states * int(self.dtype.itemsize))
        return rows * columns * self.token_bytes + encoding

    @torch.inference_mode()
    def use(self, weights: Mapping[str, Any]) -> None:
        if self.rounder is not None:
            weights = self.rounder(weights)
        if bits := self.mantissa_bits:
            weights = LazyWeights(weights, lambda _, weight: round_mantissa(weight, bits))
        self.weights.load(weights)
        self.loads += 1
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        if (policy := self.drafts) is not None:
            policy.begin_version()
            if policy.rows == "auto" and not policy.seconds:
                # measure steps without and with drafts to verify, by their number of rows
                policy.seconds = seconds = {}
                for rows in (1 << power for power in range(self.slots.bit_length())):
                    if self._compute_bytes(rows, BRIEF, 0) > get_free_bytes(self.device) / 4:
                        break
                    plain, verified = (
                        self._time_verification(rows, width)
                        for width in (1, 1 + policy.draft_tokens)
                    )
                    seconds[rows] = plain, verified
                    # cannot pay, nor can it with more rows
                    if verified > (1 + policy.draft_tokens) * plain:
                        break
        if self.in_flight == "recompute_kv" and self.rows:
            self._recompute()

    def add(self, requests: Iterable[CompletionRequest]) -> None:
        requests = list(requests)
        super().add(requests)
        if self.drafts is not None:
            for request in requests:
                self.draft_book.open(request)

    @torch.inference_mode()
    def step(self, steps: int = 8) -> list[Completion]:
        completions: list[Completion] = []
        end = self.steps_made + steps
        while self.steps_made < end:
            if not self.rows:
                self.used = 0
                self.clock = 0
                self.columns.clear()
            if self.queue:  # refill free rows in chunks
                free = self.slots - len(self.rows)
                chunk = min(CHUNK, max(1, self.slots // 4), len(self.queue))
                if free >= chunk or not self.rows:
                    count = min(free, len(self.queue))
                    self._admit([self.queue.popleft() for _ in range(count)])
            elif len(self.rows) < SHRINK * self.used:
                # move the live rows to the front, so that no step computes the ended ones
                index = torch.tensor(list(self.rows), device=self.device)
                count = len(index)
                for stored in (*self.cache.stored, self.integers, self.floats):
                    stored[:, :count] = stored.index_select(1, index)
                for tensor in (
                    self.cache.bias,
                    self.stop,
                    self.uniform,
                    self.out_token,
                    self.out_logprob,
                    self.out_routed,
                ):
                    if tensor is not None:
                        tensor[:count] = tensor[index]
                self.rows = dict(enumerate(self.rows.values()))
                self.used = count
            if not self.rows:
                break
            completions += self._decode(end - self.steps_made)
        return completions

    @torch.inference_mode()
    def score_prompt(self, ids: ndarray, most_likely: int) -> PromptScores:
        tokens = self._pad_columns(ids[None])
        states = decoder.run_layers(self.weights, tokens)[: len(ids) - 1]
        count, logits = self.weights.vocabulary, self.weights.compute_logits
        return score_states(states, tokens[0, 1 : len(ids)], most_likely, logits, count)

    def abort(self, keys: Iterable[Key]) -> TokenCounts:
        tokens = super().abort(keys)
        ended = [slot for slot in range(self.used) if slot not in self.rows]
        self.remaining[torch.tensor(ended, dtype=int64, device=self.device)] = 0
        return tokens

    def forget(self, request: CompletionRequest) -> None:
        if self.drafts is not None:
            self.draft_book.close(request)

    @torch.inference_mode()
    def erase_cache(self) -> None:
        """Zero the keys and values of ended requests.

        Attention hides them by the weight 0, but 0 times a value that is not finite is not 0."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        for tensor in (*self.cache.stored, self.out_logprob):
            tensor.zero_()

    def collect_metrics(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        if self.prefix_cache is not None:
            numbers = {
                "prefix/hits": self.hits,
                "prefix/reused_tokens": self.reused,
                "prefix/encoded_tokens": self.encoded,
            }
        if self.drafts is not None:
            numbers |= {"draft/proposed": self.proposed, "draft/accepted": self.accepted}
        return numbers

    # ---- where a row's tokens are ----------------------------------------------------------------

    def _list_key_columns(self, row: EmbeddedRow, count: int) -> ndarray:
        """Return the cache's columns of its first `count` tokens, the prompt's included."""
        prompt = len(row.request.prompt) - 1
        if self.by_position or count <= prompt:
            return np.arange(count)
        steps = self.columns.list_columns(row.born, row.born + count - prompt)
        return np.concatenate([np.arange(prompt), self.prompt_needed + steps])

    # ---- rows ------------------------------------------------------------------------------------

    def _admit(self, requests: list[CompletionRequest]) -> None:
        self._reserve(requests)
        slots = [slot for slot in range(self.slots) if slot not in self.rows][: len(requests)]
        index = torch.tensor(slots, device=self.device)
        for slot, request in zip(slots, requests, strict=True):
            marks = [(0, self.label, self.digest)]
            self.rows[slot] = EmbeddedRow(request, marks, born=self.clock, loads=self.loads)
        self.rows = dict(sorted(self.rows.items()))
        self.used = max(self.used, len(self.rows))

        def put(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        integers = [
            (int(r.prompt[-1]), len(r.prompt) - 1, r.max_new_tokens, 0, r.top_k) for r in requests
        ]
        self.integers[:, index] = put(integers, int64).T
        floats = put([(r.temperature, r.top_p) for r in requests], torch.float32)
        self.scale[index], self.top_p[index] = 1.0 / floats[:, 0], floats[:, 1]
        # each row sees the columns of its prompt, whose last token is a decode input
        columns = torch.arange(self.cache.bias.shape[2], device=self.device)
        visible = columns < self.position[index][:, None]
        self.cache.bias[index, 0] = torch.where(visible, 0.0, decoder.MASKED)
        width = self.stop.shape[1]
        self.stop[index] = put(
            [list(request.stop) + [-1] * (width - len(request.stop)) for request in requests], int64
        )
        stream = draw_uniform_rows([request.stream for request in requests], self.uniform.shape[1])
        self.uniform[index] = self._put(stream)
        self._write_prompts(dict(zip(slots, requests, strict=True)))
        live = [row.request for row in self.rows.values()]
        self.plain = all(request.temperature == 1 and not request.has_support for request in live)
        self.cuts = any(request.truncates for request in live)

    def _reserve(self, requests: list[CompletionRequest]) -> None:
        """Grow the cache and tables for longer prompts or responses or more stop tokens."""
        prompt = max(self.prompt_needed, *(len(request.prompt) - 1 for request in requests))
        response = max(self.columns.count, *(request.max_new_tokens for request in requests))
        stops = max(1, *(len(request.stop) for request in requests))
        if stops > self.stop.shape[1]:
            self.graphs.clear()
            self.stop = pad(self.stop, (0, stops - self.stop.shape[1]), value=-1)
        previous, count = self.cache, self.cache.bias.shape[2]
        if count and (prompt, response) == (self.prompt_needed, self.columns.count):
            return
        old_prompt = self.prompt_needed
        self.graphs.clear()
        self.prompt_needed = exact_operators.round_up(prompt, 8 if self.on_cpu else SEEN)
        columns = self.prompt_needed + response
        if self.drafts is not None:  # drafts of a row may reach beyond its last token
            columns += self.drafts.draft_tokens
        if self.fixed:
            columns = exact_operators.round_up(columns, exact_operators.KEYS)
        # in main memory, pages of untouched rows take no space
        rows = min(self.slots, self.used + len(requests)) if self.on_cpu else self.slots
        needed_bytes = self._compute_bytes(rows, columns, prompt)
        if needed_bytes > (free_bytes := get_free_bytes(self.device)):
            raise ConfigError(
                f"a prompt of {prompt + 1} tokens: the keys and values of {rows} sequences of up "
                f"to {columns} tokens take {format_gb(needed_bytes)}, and "
                f"{format_gb(free_bytes)} are free; lower generator.slots = {self.slots} or "
                f"generator.context = {self.context}"
            )
        self.cache = self._make_cache(self.slots, columns)
        if response > self.columns.count:
            added = response - self.columns.count
            self.columns.grow(response)
            self.uniform, self.out_token, self.out_logprob = (
                pad(tensor, (0, added))
                for tensor in (self.uniform, self.out_token, self.out_logprob)
            )
            if self.out_routed is not None:
                self.out_routed = pad(self.out_routed, (0, 0, 0, 0, 0, added))
        # the columns of prompts, then those of steps; without a column, nothing is copied
        column_ranges = [(0, 0, old_prompt), (self.prompt_needed, old_prompt, count)]
        if self.by_position or not count:
            column_ranges = [(0, 0, count)]
        for target_start, start, end in column_ranges:
            target = slice(target_start, target_start + end - start)
            for copy, original in ((self.cache.k, previous.k), (self.cache.v, previous.v)):
                # pages of the other rows stay untouched
                copy[:, : self.used, :, target] = original[:, : self.used, :, start:end]
            self.cache.bias[:, :, target] = previous.bias[:, :, start:end]

    def _make_cache(self, rows: int, columns: int) -> decoder.ColumnCache:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return decoder.ColumnCache(self.lay, self.weights.layers, rows, columns, like)

    def _put(self, array: ndarray) -> Tensor:
        return from_numpy(array).to(self.device)

    def _pad_columns(self, ids: ndarray) -> Tensor:
        """Copy ids [B, L] to the device; in exact mode L becomes a multiple of KEYS."""
        if self.fixed:
            padding = -ids.shape[1] % exact_operators.KEYS
            ids = np.pad(ids, ((0, 0), (0, padding)))
        return self._put(ids)

    def _write_prompts(self, requests: Mapping[int, CompletionRequest]) -> None:
        """Fill each row with its prompt's keys and values, and keep them for later.

        The last prompt token is excluded: it is the first decode input.

        requests: by their slots.
        """
        prompt_of = {
            request.group: request.prompt[:-1]
            for request in requests.values()
            if len(request.prompt) > 1
        }
        blocks_of = {
            group: self.prefix_cache.find(prompt) if self.prefix_cache is not None else []
            for group, prompt in prompt_of.items()
        }
        for has_prefix in (False, True):
            names = [group for group in prompt_of if bool(blocks_of[group]) == has_prefix]
            lengths = [1 + len(prompt_of[group]) for group in names]
            for batch in split_by_length(lengths, TOGETHER, CHUNK):
                members = {names[index]: number for number, index in enumerate(sorted(batch))}
                owners = {
                    slot: members[request.group]
                    for slot, request in requests.items()
                    if request.group in members
                }
                columns = [decoder.PrefixCache.list_columns(blocks_of[group]) for group in members]
                self._write_batch(owners, [prompt_of[group] for group in members], columns)
        if self.prefix_cache is not None:
            slot_of = {request.group: slot for slot, request in requests.items()}
            for group, prompt in prompt_of.items():
                self._keep(slot_of[group], prompt, self.join_routing(self.rows[slot_of[group]]))

    def _keep(self, slot: int, tokens: ndarray, routed: RoutedExperts | None) -> None:
        """Keep the keys, values and experts of a row's first tokens for later prompts."""
        if self.prefix_cache is not None:
            self.prefix_cache.store(
                tokens,
                self.cache.k[:, slot],
                self.cache.v[:, slot],
                self._list_key_columns(self.rows[slot], len(tokens)),
                None if routed is None else routed.ids,
            )

    def _write_batch(
        self,
        owners: Mapping[int, int],
        sequences: TokenRows,
        kept_columns: TokenRows,
        replayed: Sequence[RoutedExperts | None] | None = None,
    ) -> None:
        """Encode distinct sequences into all rows that have them.

        Args:
            owners: slot of a row -> index of its sequence.
            sequences: int32, prompts, or prompts with a part of their responses.
            kept_columns: the columns of the prefix cache that each begins with, behind which it is
                encoded; all have some, or none has.
            replayed: the experts to use for each; None: the router's own, which are recorded.
        """
        prefix_lengths = [len(columns) for columns in kept_columns]
        suffixes = [p[length:] for p, length in zip(sequences, prefix_lengths, strict=True)]
        ids = pad_token_rows(suffixes)
        prefix = None
        if self.prefix_cache is not None and any(prefix_lengths):
            past_columns = self._put(pad_token_rows(kept_columns))
            prefix = decoder.PrefilledPrefix(
                self.prefix_cache.k[:, :, past_columns].transpose(1, 2),
                self.prefix_cache.v[:, :, past_columns].transpose(1, 2),
                torch.tensor(prefix_lengths, device=self.device),
            )
            row, source = self._put(np.array([*owners.items()]).T)
            for cached, prefix_tensor in ((self.cache.k, prefix.k), (self.cache.v, prefix.v)):
                cached[:, row, :, : past_columns.shape[1]] = prefix_tensor[:, source]
            self.hits += len(sequences)
        if replayed is None:
            self.reused += sum(prefix_lengths)
            self.encoded += sum(map(len, suffixes))
        chosen: RoutedLayers = None if self.routing is None or replayed is not None else []
        if ids.shape[1]:
            tokens = self._pad_columns(ids)
            replay = router_hooks.build_padded_table(
                replayed, self.routing, tokens.shape[1], self.device
            )
            layers = decoder.encode(
                self.weights, tokens, prefix=prefix, routed=chosen, replayed=replay
            )
            # of every token of every row: slot, column, index of its suffix and position there
            columns = [
                self._list_key_columns(self.rows[slot], len(sequences[owner]))[
                    prefix_lengths[owner] :
                ]
                for slot, owner in owners.items()
            ]
            counts = [len(of_row) for of_row in columns]
            to_row, to_column, suffix, token = (
                self._put(places)
                for places in (
                    np.repeat(list(owners), counts),
                    np.concatenate(columns),
                    np.repeat(list(owners.values()), counts),
                    np.concatenate([np.arange(count) for count in counts]),
                )
            )
            for layer, (keys, values) in enumerate(layers):
                self.cache.k[layer][to_row, :, to_column] = keys[suffix, :, token]
                self.cache.v[layer][to_row, :, to_column] = values[suffix, :, token]
        if chosen is not None and self.routing is not None:
            # a last layer encodes no prompt, because its output is not needed: it is not recorded
            size = (*ids.shape, self.routing.layers, self.routing.chosen)
            table = np.full(size, self.routing.experts, np.uint16)
            for layer, experts in enumerate(chosen):
                of_rows = experts.view(len(suffixes), -1, self.routing.chosen)
                table[:, :, layer] = of_rows[:, : ids.shape[1]].cpu().numpy()
            for slot, owner in owners.items():
                if prefix is not None:
                    assert self.prefix_cache is not None and self.prefix_cache.routed is not None
                    self.rows[slot].routed.append(self.prefix_cache.routed[kept_columns[owner]])
                self.rows[slot].routed.append(table[owner, : len(suffixes[owner])])

    def _recompute(self) -> None:
        """Rebuild the keys and values of every live row with the weights now loaded.

        Tokens keep their recorded experts, with which a learner computes them, too.
        """
        slots = list(self.rows)
        lengths = [len(row.request.prompt) + row.sampled for row in self.rows.values()]
        for batch in split_by_length(lengths, TOGETHER, CHUNK):
            owners = {slots[index]: number for number, index in enumerate(batch)}
            sequences, experts = [], []
            for slot in owners:
                row = self.rows[slot]
                row.loads = self.loads
                sampled = self.out_token[slot, : row.sampled].cpu().numpy().astype(np.int32)
                sequences.append(np.concatenate([row.request.prompt, sampled])[:-1])
                experts.append(self._join_all_routing(slot))
            self._write_batch(owners, sequences, [NO_COLUMNS] * len(owners), experts)

    # ---- decoding --------------------------------------------------------------------------------

    def _decode(self, steps: int) -> list[Completion]:
        """Make at most `steps` steps, then read the device.

        One at a time on a CPU, with drafts or with a grammar. No row reaches its last token before
        the last step.
        """
        count = self.used
        drafts = None if self.drafts is None else self._propose(self.drafts)
        width = 1 if drafts is None else 1 + drafts.shape[1]
        allowed = None  # bool [n, V]: the tokens that grammars leave to each row; None: all
        if not self.plain:
            allowed = constraints.compute_allowed_tokens(
                self.list_constraints(count), self.weights.vocabulary, self.device
            )
        if self.on_cpu or drafts is not None or allowed is not None:
            steps = 1
        else:
            rows = self.rows.values()
            steps = min(steps, *(row.request.max_new_tokens - row.sampled for row in rows))
            count = min(self.slots, 1 << (count - 1).bit_length())
        end = width
        if self.by_position:
            end += max(len(row.request.prompt) - 1 + row.sampled for row in self.rows.values())
        masks = [self._run_step(count, end + step, drafts, allowed) for step in range(steps)]
        if allowed is not None:  # constrained rows draft nothing
            constraints.advance(self.list_constraints(count), self.token[:count])
        remaining = self.remaining[: self.used].tolist()
        made = {}
        for slot, row in self.rows.items():
            left = max(remaining[slot], -1 - remaining[slot])
            made[slot] = row.request.max_new_tokens - left - row.sampled
            row.sampled += made[slot]
        if masks[0] is not None:
            self.record_kept(torch.cat(masks, 1), made)
        if width > 1 and drafts is not None and self.drafts is not None:
            yielded = sum(made.values())
            self.proposed += int((drafts >= 0).sum())
            self.accepted += yielded - len(made)
            self.drafts.count(len(made), yielded)
        return self._finish_rows([slot for slot, left in enumerate(remaining) if left < 0])

    def _run_step(self, count: int, end: int, drafts: Tensor | None, allowed: Tensor | None) -> Any:
        """Start a step, on a GPU as a graph from its second time on. See `_advance`.

        A graph has one shape: `count` rows, and columns rounded up to SEEN, or all where attention
        reads each row's own. It reads and writes the engine's own tensors, into which weights,
        prompts and compacted rows are copied. So it is valid until one of them is replaced.

        Args:
            count: rows, of which those behind the used ones are computed for nothing.
            end: no live row reads a column of the cache from here on, where keys are by position.
        """
        self.clock += 1
        self.steps_made += 1
        if not self.by_position:
            column = self.columns.allocate(
                self.clock - 1, lambda: min(row.born for row in self.rows.values())
            )
            # all columns up to the highest used one, rounded up so that short responses use one
            # kernel for all steps
            end = exact_operators.round_up(self.prompt_needed + self.columns.high, decoder.BLOCK)
            end = min(end, self.cache.bias.shape[2])
            return self._advance(count, end, None, allowed, self.prompt_needed + column)
        if self.on_cpu or drafts is not None or allowed is not None:
            return self._advance(count, end, drafts, allowed)
        columns = self.cache.bias.shape[2]
        end = columns if self.weights.flash else min(exact_operators.round_up(end, SEEN), columns)
        step = partial(self._advance, count, end, None, None)
        if self.lay.experts is not None:  # experts have shapes that depend on their tokens
            return step()
        key = count, end, self.plain, self.cuts
        if key not in self.graphs:  # what a graph may not make, such as workspaces, exists then
            self.graphs[key] = None
            return step()
        graph = self.graphs[key] = self.graphs[key] or decoder.capture(step)
        kept_mask = graph()
        return None if kept_mask is None else kept_mask.clone()  # the next run overwrites it

    def _advance(
        self,
        count: int,
        end: int,
        drafts: Tensor | None,
        allowed: Tensor | None,
        column: int | None = None,
    ) -> Tensor | None:
        """Make a step without waiting for the device.

        Each row accepts the tokens that it would have sampled: its draft's tokens before the first
        difference, and the sampled one there. The row's own token count selects its uniform, so
        that a sample does not depend on the rows beside it.

        Args:
            end: no live row reads a column of the cache from here on.
            drafts: [count, m - 1]; -1: none. None: m = 1.
            allowed: bool [count, V], the tokens that grammars leave; None: all.
            column: of the cache, that all rows write; None: each that of its position.

        Returns the kept tokens, bool [count, m, V]; None: all.
        """
        routed: RoutedLayers = None if self.routing is None else []
        tokens, positions = self.token[:count, None], self.position[:count, None]
        columns = self.count[:count, None]
        if drafts is not None:
            tokens = torch.cat([tokens, drafts.clamp(min=0)], 1)
            steps = torch.arange(tokens.shape[1], device=self.device)
            positions, columns = positions + steps, columns + steps
        width = tokens.shape[1]
        logits = decoder.decode(
            self.weights, self.cache, tokens, positions, end, column=column, routed=routed
        )

        def repeat_by_token(by_row: Tensor) -> Tensor:
            return by_row[:count].repeat_interleave(width, 0)

        token, logprob, kept_mask = (
            None if sampled is None else sampled.view(count, width, *sampled.shape[1:])
            for sampled in decoder.sample(
                logits,
                self.uniform[:count].gather(1, columns).flatten(),
                None if self.plain else repeat_by_token(self.scale),
                (repeat_by_token(self.top_p), repeat_by_token(self.top_k)) if self.cuts else None,
                None if allowed is None else repeat_by_token(allowed),
            )
        )
        assert token is not None and logprob is not None
        self.out_token[:count].scatter_(1, columns, token)
        self.out_logprob[:count].scatter_(1, columns, logprob)
        if routed is not None and self.out_routed is not None:
            experts = torch.stack(routed, 1)[: count * width].to(self.out_routed.dtype)
            rows = torch.arange(count, device=self.device)[:, None]
            self.out_routed[rows, columns] = experts.view(count, width, *experts.shape[1:])
        left = self.remaining[:count]
        live = left > 0
        accepted, stopped, last = live.long(), (token == self.stop[:count]).any(1), token[:, 0]
        if drafts is not None:
            stop = self.stop[:count]
            accepted, stopped = decoder.count_accepted(token, drafts, stop, left.clamp(min=0))
            last = token.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
        left.sub_(accepted)
        left.copy_(torch.where(live & (stopped | (left == 0)), -1 - left, left))
        self.token[:count] = last
        self.count[:count].add_(accepted)
        self.position[:count].add_(accepted)
        return kept_mask

    def _propose(self, policy: DraftPolicy) -> Tensor:
        """Return the drafts of all rows, int64 [rows, D], padded with -1; D may be 0."""
        drafts: list[list[int]] = [[] for _ in range(self.used)]
        if policy.pays(len(self.rows)):
            began = time.perf_counter()
            for slot, row in self.rows.items():
                if row.request.constraint is not None:
                    continue
                limit = min(policy.draft_tokens, row.request.max_new_tokens - row.sampled - 1)
                if not limit:
                    continue
                indexed_count = self.draft_book.count_indexed(row.request)
                new_tokens = self.out_token[slot, indexed_count : row.sampled].tolist()
                drafts[slot] = self.draft_book.propose(row.request, new_tokens, limit)
            policy.looked_up += len(self.rows)
            policy.lookup_s += time.perf_counter() - began
        width = max(map(len, drafts))
        padded = [draft + [-1] * (width - len(draft)) for draft in drafts]
        return torch.tensor(padded, dtype=int64, device=self.device).view(len(drafts), width)

    def _time_verification(self, rows: int, width: int) -> float:
        """Return the least seconds of three steps of `rows` rows in an empty cache."""
        columns = exact_operators.round_up(min(self.context, BRIEF), exact_operators.KEYS)
        cache = self._make_cache(rows, columns)
        tokens = zeros(rows, width, dtype=int64, device=self.device)
        positions = torch.arange(width, device=self.device).expand(rows, width)
        seconds = []
        for _ in range(4):  # the first one warms up
            began = time.perf_counter()
            decoder.decode(self.weights, cache, tokens, positions, columns).sum().item()
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:])

    def _finish_rows(self, ended_slots: list[int]) -> list[Completion]:
        """Read the completions of the rows `ended_slots` together and free these rows."""
        if not ended_slots:
            return []
        ended_tokens = self.out_token[ended_slots].cpu().numpy().astype(np.int32)
        logprobs = self.out_logprob[ended_slots].cpu().numpy()
        self.remaining[ended_slots] = 0
        completions = []
        for index, slot in enumerate(ended_slots):
            row = self.rows[slot]
            tokens = ended_tokens[index, : row.sampled]
            experts = self._join_all_routing(slot)
            # keep the keys, values and experts of all but the last token, which was never an
            # input; an earlier version may have chosen experts of the keys
            if row.loads == self.loads and (experts is None or len(row.marks) == 1):
                self._keep(slot, np.concatenate([row.request.prompt, tokens[:-1]]), experts)
            if self.drafts is not None:
                self.draft_book.close(row.request, tokens)
            completions.append(self.finish(slot, tokens, logprobs[index, : row.sampled], experts))
        return completions

    def _join_all_routing(self, slot: int) -> RoutedExperts | None:
        """Join the experts of a row's prompt with those of its decode steps."""
        if self.out_routed is None:
            return None
        steps = self.out_routed[slot, : self.rows[slot].sampled].cpu().numpy().astype(np.uint16)
        return self.join_routing(self.rows[slot], steps)


def get_free_bytes(device: torch.device) -> int:
    """Return the bytes of `device` that this process can still allocate."""
    if device.type != "cuda":
        return machine_memory.read_free_bytes()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(
        free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    )


def format_gb(size: int) -> str:
    """Format bytes as gigabytes."""
    return f"{size / 1e9:.1f} GB"


def pad_token_rows(rows: TokenRows) -> ndarray:
    """Pad token rows with zeros at the right: int64 [rows, length of the longest]."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def round_mantissa(weights: Tensor, bits: int) -> Tensor:
    """Round to the nearest number with `bits` stored mantissa bits, at any exponent.

    bfloat16 has 7 bits, fp8 (e4m3) 3.

    >>> round_mantissa(torch.tensor([1.0, 1.06, -1.07, 0.53, 3e-30]), 3).tolist()[:4]
    [1.0, 1.0, -1.125, 0.5]
    """
    mantissa, exponent = torch.frexp(weights.float())
    return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)) * 2.0 ** -(bits + 1), exponent).to(
        weights.dtype
    )


def make_engine(config: Config) -> Engine:
    """Build the embedded engine for `config`.

    Llama-like models get the packed forward, any other model transformers' own.
    """
    settings = config.generator
    dtype = config.model.dtype if settings.dtype == "same" else settings.dtype
    torch.set_num_threads(settings.threads)
    memory.keep_freed()
    model = load_policy(Path(config.model.path), dtype, config.model.device)
    from actors.engine_generic import GenericEngine

    engine_class: Any = EmbeddedEngine
    packed_settings: dict[str, Any] = {
        "mantissa_bits": settings.mantissa_bits,
        "quantize": settings.quantize,
        "drafts": DraftPolicy(settings.speculate, settings.draft_rows)
        if settings.speculate
        else None,
        "kept_tokens": settings.prefix_cache_tokens if config.uses_sessions else 0,
    }
    if model.fast is None:
        engine_class, packed_settings = GenericEngine, {}
        for key, neutral_value in (("mantissa_bits", 0), ("quantize", "none"), ("speculate", 0)):
            if getattr(settings, key) != neutral_value:
                raise ConfigError(
                    f"generator.{key}: needs a model of the packed forward (Llama, Qwen2, Qwen3, "
                    f"Mistral, Qwen3-MoE, Mixtral); set it to {neutral_value}"
                )
    if settings.quantize != "none" and model.fast is not None and model.fast.experts is not None:
        raise ConfigError(
            "generator.quantize: does not round the experts of a mixture, which are most of its "
            "weights; set it to none"
        )
    engine: Engine = engine_class(
        model,
        slots=settings.slots,
        context=settings.context,
        in_flight=config.weights.in_flight,
        max_new_tokens=settings.max_new_tokens,
        base=AdapterBase(model, config.lora) if config.lora.rank else None,
        record_routing=bool(config.learner.replay_routing and model.require_replayable_routing()),
        fixed=bool(config.exact),
        **packed_settings,
    )
    return engine
