"""GRPO on two or four CPU ranks: context parallel, and data parallel over it.

    torchrun --standalone --nproc-per-node 2 examples/cp_grpo.py     # cp = 2
    torchrun --standalone --nproc-per-node 4 examples/cp_grpo.py     # dp = 2, cp = 2

A tiny Mamba-2/attention hybrid learns to answer with tokens of the vocabulary's lower half. Each
context group samples answers to one prompt, and each of its ranks runs its part of their forest.
"""

from __future__ import annotations

from statistics import mean, pstdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BambaConfig

from prefix_rewrite import CapturedCall, PrefixForest, prefix_compile

VOCAB = 32
PROMPT, ANSWER, GROUP, STEPS = 24, 6, 8, 31


def build_model() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=16,
        mamba_chunk_size=16,
    )
    return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def sample_answers(model: nn.Module, generator: torch.Generator) -> list[list[int]]:
    """Sample a group of answers to one random prompt; rows of prompt and answer."""
    prompt = torch.randint(0, VOCAB, (PROMPT,), generator=generator)
    rows = prompt.repeat(GROUP, 1)
    for _ in range(ANSWER):
        logits = model(input_ids=rows, use_cache=False).logits[:, -1]
        rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return rows.tolist()


def share(made: Any, mesh: DeviceMesh) -> Any:
    """Give the group what its first rank made: its ranks must run the same calls."""
    box = [made]
    dist.broadcast_object_list(box, group=mesh.get_group(), group_src=0)
    return box[0]


def grpo_loss(logprobs: list[Tensor], rewards: list[float]) -> Tensor:
    """Policy gradient with each reward compared to its group's."""
    average, spread = mean(rewards), pstdev(rewards) + 1e-4
    pairs = zip(logprobs, rewards, strict=True)
    return -torch.stack([(r - average) / spread * row.sum() for row, r in pairs]).mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    model = build_model()
    compiled = prefix_compile(model, cp_mesh=mesh["cp"])
    over_ranks = DistributedDataParallel(compiled) if shape[0] > 1 else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for step in range(STEPS):
        rows = share(sample_answers(model, generator), mesh["cp"])
        rewards = [mean(token < VOCAB // 2 for token in row[PROMPT:]) for row in rows]
        forest = PrefixForest.from_calls(CapturedCall(r[:PROMPT], r[PROMPT:]) for r in rows)
        optimizer.zero_grad()
        if over_ranks is None:
            grpo_loss(compiled(forest).per_call(), rewards).backward()
            compiled.sync_gradients()
        else:  # DDP takes the mean over all ranks, of which each holds one of cp parts
            loss = mesh["cp"].size() * grpo_loss(over_ranks(forest).per_call(), rewards)
            loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:2d}  tokens {forest.num_tokens}  reward {mean(rewards):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
