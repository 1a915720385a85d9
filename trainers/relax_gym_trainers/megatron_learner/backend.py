"""One rank of many as a `Backend`: its share of each batch through Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relax_gym.errors import TrainingError
from relax_gym.types import TrainingSample
from relax_gym_trainers.device import download, upload
from relax_gym_trainers.megatron_learner import batches, compat  # noqa: F401  (compat before megatron)
from relax_gym_trainers.megatron_learner.batches import ContextShare, PackedBatch, Plan, split_for_context
from relax_gym_trainers.megatron_learner.divergence import shared_head, vocab_parallel_divergence
from relax_gym_trainers.megatron_learner.logprobs import vocab_parallel_logprobs
from relax_gym_trainers.megatron_learner.model import output_weight
from relax_gym_trainers.megatron_learner.modules.adapters import changing
from relax_gym_trainers.megatron_learner.modules.pieces import keep_lengths
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.replay import RouterReplay, refuse_wrong
from relax_gym_trainers.megatron_learner.towers import MediaReader
from relax_gym_trainers.reference import Reference
from relax_gym_trainers.torch_learner.distillation import Distiller
from relax_gym_trainers.torch_learner.divergence import Target
from relax_gym_trainers.torch_learner.logprobs import Head as Rows
from relax_gym_trainers.torch_learner.objectives import Piece
from relax_gym_trainers.torch_learner.update import Part, Tally, differentiate, finite, imitation_loss

from megatron.core import parallel_state  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip

if TYPE_CHECKING:
    from relax_gym_trainers.megatron_learner.distillation import RankDistiller

T = TypeVar("T")
Scores = tuple[Tensor, ...]
"""Log-probs and entropies of some tokens, and with a teacher the divergence from it and its log-probs; [n] each."""
Loss = Callable[[int, PackedBatch, Scores], tuple[Tensor, list[Tensor | None]]]
"""(number and micro-batch, the scores of all its trained tokens [N]) → its loss and that loss's gradients against the
first of them, if they have any."""
End = Callable[[Tensor, int, ContextShare], tuple[float | Tensor, Tensor]]
"""(hidden states of a numbered micro-batch's share) → its loss, and a number with the same gradient."""
Look = Callable[[Tensor, PackedBatch, ContextShare], T]
"""What is read off the hidden states of a micro-batch's share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How hidden states become log-probs; see `vocab_parallel_logprobs`."""

    vocabulary: int
    temperature: float
    never: Sequence[int]
    chunk: int
    dtype: torch.dtype


def pair_cost(config: Any) -> float:
    """What causal attention costs for each pair of tokens of a sequence, in units of what a token costs in the matrices
    of a layer (Megatron's config); of experts those that a token uses."""
    width, shared = (heads * config.kv_channels for heads in (config.num_attention_heads, config.num_query_groups))
    inner = config.moe_ffn_hidden_size * config.moe_router_topk if config.num_moe_experts else config.ffn_hidden_size
    return float(width / (config.hidden_size * (2 * width + 2 * shared + 3 * inner)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPart(Part[PackedBatch]):
    """The share of one data-parallel rank, and the plan of all."""

    plan: Plan


class MegatronBackend:
    """See `Backend`. Gradients go to the buffers of Megatron's data-parallel wrapper.

    The loss of all micro-batches of all ranks is a sum: its weights have the totals of the update in them. So Megatron
    is to add gradients and never to average, which `calculate_per_token_loss` makes it do.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        layout: Layout,
        options: MegatronLearnerOptions,
        head: Head,
        reader: MediaReader | None = None,
    ) -> None:
        """`chunks` are this rank's parts of the model, wrapped for data parallelism; without a `reader` it reads text
        only."""
        self.chunks, self.layout, self.options, self.head = list(chunks), layout, options, head
        self.reader = reader
        parameters = changing(self.chunks)
        self.device = parameters[0].device
        self.reference = Reference(parameters, offload=options.offload_reference)
        self.control: Any = dist.new_group(backend="gloo", timeout=options.patience)
        self.replays = {chunk: RouterReplay(chunk) for chunk in self.chunks}
        self._pair_cost = pair_cost(self.chunks[0].config)

    # What objectives ask for ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Backend.begin`."""
        for chunk in self.chunks:
            chunk.restore_grad_buffers(synchronize=False)  # where a rest has freed them
            chunk.zero_grad_buffer()

    def plan(
        self, samples: Sequence[TrainingSample], *, skip_flat: bool, distiller: Distiller | None = None
    ) -> RankPart:
        """See `Backend.plan`."""
        plan = batches.plan(
            samples,
            ranks=self.layout.dp,
            budget=self.options.micro_batch_tokens * self.layout.cp,
            align=self.layout.token_multiple,
            skip_flat=skip_flat,
            pair_cost=self._pair_cost,
            multiple=self.layout.pp if self.layout.vpp > 1 else 1,
            apart=None if distiller is None else distiller.owner,
        )
        mine = plan.micro_batches(parallel_state.get_data_parallel_rank())
        return RankPart(
            plan=plan,
            micro_batches=[self.laid_out(batch) for batch in mine],
            total_tokens=plan.total_tokens,
            total_samples=plan.total_samples,
            padded_tokens=plan.padded_tokens,
            saved_tokens=0,
        )

    def score_all(self, micro_batches: Sequence[PackedBatch]) -> list[Tensor]:
        """See `Backend.score_all`. Ranks of other stages than the last get zeros."""

        def look(hidden: Tensor, batch: PackedBatch, share: ContextShare) -> Tensor:
            return self.over_context(self._score(hidden, batch, share)[0], batch, share)

        found: dict[PackedBatch, Tensor | None] = {}
        for routed in (False, True):  # a pass replays all experts or none
            some = [batch for batch in micro_batches if (batch.experts is not None) == routed]
            found |= zip(some, self.read(some, look), strict=True)
        return [
            torch.zeros(len(batch.targets)) if (scores := found[batch]) is None else scores for batch in micro_batches
        ]

    def read(self, batches: Sequence[PackedBatch], look: Look[T]) -> list[T | None]:
        """What `look` makes of each of this rank's micro-batches, without gradient; None but on the last stage."""
        found: list[T | None] = [None] * len(batches)

        def end(hidden: Tensor, number: int, share: ContextShare) -> tuple[float, Tensor]:
            found[number] = look(hidden, batches[number], share)
            return 0.0, hidden.new_zeros(())

        if batches:  # no rank has any, otherwise
            with torch.no_grad():
                self._run(batches, end, forward_only=True)
        return found

    def accumulate(self, piece: Piece, *, tally: Tally, first: bool, step: int) -> float:
        """See `Backend.accumulate`."""
        algorithm, part, distiller = piece.objective.algorithm, piece.part, piece.objective.distiller
        targets: list[Target | None] | None = None
        if distiller is not None and distiller.as_loss:
            targets = cast("RankDistiller", distiller).targets(cast("RankPart", part))

        def loss(number: int, batch: PackedBatch, scores: Scores) -> tuple[Tensor, list[Tensor | None]]:
            logprobs, entropy, *taught = scores
            tally.mean(entropy=entropy)
            terms = [(entropy, -algorithm.entropy_coef)]
            if distiller is not None and taught:
                tally.mean(opd_kl=taught[0], teacher_logprob=taught[1])
                terms.append((taught[0], distiller.weight))
            value, pairs = differentiate(
                algorithm,
                part,
                batch,
                logprobs,
                terms,
                old=None if piece.old is None else piece.old[number],
                reference=None if piece.reference is None else piece.reference[number],
                tally=tally,
                first=first,
            )
            return value, [grad for _, grad in pairs]

        return finite("loss", self._run(part.micro_batches, self._end(part, loss, targets)), step)

    def scale(self, factor: float) -> None:
        """See `Backend.scale`."""
        for chunk in self.chunks:
            chunk.scale_gradients(factor)

    def imitate(self, part: Part[PackedBatch], *, step: int) -> float:
        """See `Backend.imitate`."""

        def loss(number: int, batch: PackedBatch, scores: Scores) -> tuple[Tensor, list[Tensor | None]]:
            return imitation_loss(scores[0], part), [torch.full_like(scores[0], -1 / part.total_tokens)]

        return finite("imitation loss", self._run(part.micro_batches, self._end(part, loss)), step)

    def exchange(self, values: dict[TrainingSample, T], samples: Sequence[TrainingSample]) -> dict[TrainingSample, T]:
        """See `Backend.exchange`."""
        mine = {index: values[sample] for index, sample in enumerate(samples) if sample in values}
        return {samples[index]: value for found in self._reports(mine) for index, value in found.items()}

    def merge(self, tally: Tally) -> Tally:
        """See `Backend.merge`."""
        return sum(self._reports(tally.settle()), Tally())

    def as_reference(self) -> AbstractContextManager[None]:
        """See `Backend.as_reference`."""
        return self.reference.inside()

    # One pass over the micro-batches ----------------------------------------------------------------------------------

    def _run(self, batches: Sequence[PackedBatch], end: End, *, forward_only: bool = False) -> float:
        """All micro-batches through the pipeline; the sum of their losses over all ranks."""
        losses: list[Callable[[], Tensor]] = []
        mine = list(batches)
        shares = [self.share_of(batch) for batch in mine]
        experts = mine[0].experts if mine else None  # all have them or none
        if experts is not None:
            self.replays[self.chunks[0]].check(experts)

        def forward(iterator: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            number = next(iterator)
            hidden = self._forward(chunk, mine[number], shares[number])

            def reduce(out: Tensor, non_loss_data: bool = False) -> Any:
                value, surrogate = end(out, number, shares[number])
                losses.append(download(torch.as_tensor(value)))
                return surrogate, torch.zeros((), dtype=torch.int, device=out.device), {}  # nothing divides by tokens

            return hidden, reduce

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(range(len(mine))) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(mine),
            seq_length=self.options.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if experts is not None:
            refuse_wrong(self.replays.values(), self.control)
        return sum(self._reports(sum(float(loss()) for loss in losses)))  # while the last one still goes backward

    def _forward(self, chunk: Any, batch: PackedBatch, share: ContextShare) -> Tensor:
        device = next(chunk.parameters()).device
        cu = upload(batch.cu_seqlens, device)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=cu,
            cu_seqlens_kv_padded=cu,
            max_seqlen_q=batch.max_length,
            max_seqlen_kv=batch.max_length,
        )
        keep_lengths(packed, np.diff(batch.cu_seqlens).tolist())
        ids, positions = (upload(np.atleast_2d(array), device) for array in (share.ids, share.positions))
        if share.experts is not None:
            self.replays[chunk].keep(packed, share.experts, device)
        media = None
        if self.reader is not None and parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            media = self.reader.inputs(batch, share, device)
        out: Tensor = chunk(ids, positions, packed_seq_params=packed, media=media)
        return out

    def laid_out(self, batch: PackedBatch) -> PackedBatch:
        """The micro-batch with the positions of its media. Raises TrainingError where it cannot be read."""
        if self.reader is not None:
            return self.reader.laid_out(batch)
        if batch.media:
            raise TrainingError(f"the model reads text only, but samples have {batch.media[0]!r}")
        return batch

    def _end(self, part: Part[PackedBatch], loss: Loss, targets: Sequence[Target | None] | None = None) -> End:
        """`targets` are what teachers say about each micro-batch."""

        def end(hidden: Tensor, number: int, share: ContextShare) -> tuple[float | Tensor, Tensor]:
            batch = part.micro_batches[number]
            mine = self._score(hidden, batch, share, None if targets is None else targets[number])
            value, grads = loss(number, batch, tuple(self.over_context(scores, batch, share) for scores in mine))
            surrogate = hidden.sum() * 0  # so that an empty micro-batch has a graph, too
            trained = upload(share.trained, hidden.device)
            for scores, grad in zip(mine, grads, strict=False):
                if grad is not None:
                    surrogate = surrogate + (scores * grad[trained].to(scores)).sum()
            return value, surrogate

        return end

    def _score(self, hidden: Tensor, batch: PackedBatch, share: ContextShare, target: Target | None = None) -> Scores:
        """Of the trained tokens that this context-parallel rank's hidden states predict."""
        head = self.head
        features, targets = self.predicted(hidden, batch, share)
        group = parallel_state.get_tensor_model_parallel_group()
        scores = vocab_parallel_logprobs(
            features,
            output_weight(self.chunks[-1]),
            targets,
            group=group,
            temperature=head.temperature,
            vocabulary=head.vocabulary,
            never=head.never,
            chunk=head.chunk,
            dtype=head.dtype,
            keep=target is None,  # else two chunks' logits follow
        )
        if target is None:
            return scores
        options = {"group": group, "chunk": head.chunk, "dtype": head.dtype}
        return *scores, *vocab_parallel_divergence(features, self.rows_of_head(), target, **options)

    def share_of(self, batch: PackedBatch) -> ContextShare:
        """What this context-parallel rank computes of a micro-batch."""
        return split_for_context(batch, self.layout.cp, self._cp_rank)

    def predicted(self, hidden: Tensor, batch: PackedBatch, share: ContextShare) -> tuple[Tensor, Tensor]:
        """This share's hidden states that predict trained tokens, [n, H], and these tokens, [n]."""
        predictors, trained = (upload(a, hidden.device) for a in (share.predictors, share.trained))
        return hidden.index_select(0, predictors), upload(batch.targets, hidden.device)[trained]

    def rows_of_head(self) -> Rows:
        """This tensor-parallel rank's rows of the last stage's head."""
        head = self.head
        return shared_head(
            output_weight(self.chunks[-1]),
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=head.temperature,
            vocabulary=head.vocabulary,
            never=head.never,
        )

    def over_context(self, values: Tensor, batch: PackedBatch, share: ContextShare) -> Tensor:
        """Those of all N trained tokens, [N, ..], without gradient, from the parts of the context-parallel ranks."""
        if self.layout.cp == 1:
            return values.detach()
        whole = values.new_zeros(len(batch.targets), *values.shape[1:])
        whole[upload(share.trained, values.device)] = values.detach()
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @property
    def _cp_rank(self) -> int:
        return int(parallel_state.get_context_parallel_rank())

    def _reports(self, value: T) -> list[T]:
        """What the ranks have of which there is one for each share of the samples, and which know its scores."""
        last = parallel_state.is_pipeline_last_stage()
        reports = last and self._cp_rank == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
        found: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(found, value if reports else None, group=self.control)
        return [one for one in found if one is not None]
