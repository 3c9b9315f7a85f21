"""Context parallel on gloo: any number of ranks gives what one device gives."""

from __future__ import annotations

import pytest
from launch import launch, run_ranks


@pytest.mark.parametrize("family", ("llama", "bamba", "nemotron_h", "zamba2"))
def test_one_to_four_ranks_equal_one_device_in_fp64(family):
    run_ranks("cp_worker.py", "parity", family, "float64", "1", "2", "3", "4", num_ranks=4)


@pytest.mark.parametrize("family", ("mamba", "qwen3_next", "lfm2", "gpt_oss", "recurrent_gemma"))
def test_other_mixers_on_ranks_equal_one_device_in_fp64(family):
    run_ranks("cp_worker.py", "parity", family, "float64", "3", num_ranks=3)


def test_ranks_equal_one_device_in_fp32():
    run_ranks("cp_worker.py", "parity", "bamba", "float32", "2", num_ranks=2)


def test_what_crosses_ranks_gets_its_gradient():
    run_ranks("cp_worker.py", "crossings", "bamba", num_ranks=2)


def test_ranks_that_disagree_all_raise():
    run_ranks("cp_worker.py", "disagreements", num_ranks=2)


def test_a_killed_rank_ends_the_others():
    code, output = launch("cp_worker.py", "killed", num_ranks=2)
    assert code != 0
    assert "exitcode  : 17" in output, output[-3000:]
    assert "went on alone" not in output


@pytest.mark.parametrize("family", ("gpt_oss", "jamba_moe"))
def test_experts_loss_on_ranks_is_that_of_one_device(family):
    run_ranks("cp_worker.py", "load_balancing", family, num_ranks=3)


def test_ddp_over_data_and_context_ranks():
    run_ranks("cp_worker.py", "ddp", "bamba", num_ranks=4)


@pytest.mark.parametrize("family", ("llama", "bamba"))
def test_fsdp2_over_data_and_context_ranks(family):
    run_ranks("cp_worker.py", "fsdp", family, num_ranks=4)


def test_fsdp2_alone():
    run_ranks("cp_worker.py", "fsdp_alone", num_ranks=2)


def test_fsdp2_gathers_a_parameter_only_while_a_module_uses_it():
    run_ranks("cp_worker.py", "fsdp_memory", num_ranks=2)


def test_fsdp2_parameters_changed_before_the_backward_are_refused():
    run_ranks("cp_worker.py", "fsdp_changed_parameters", num_ranks=2)


def test_fsdp2_policies_that_change_numbers_are_refused():
    run_ranks("cp_worker.py", "fsdp_refusals", num_ranks=2)
