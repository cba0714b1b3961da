"""Infer the role of a product in a model from the product's kind and the path of its module."""

from __future__ import annotations

import re

from kernels.problem import Conv
from sweeps.capture.captured import Attention, GroupedGemm, Work

_INSIDE = r"(^|[._])(attn|attention|self_attn|attend|SelfAttention|EncDecAttention)\b"
"""Pattern that occurs in the path of an attention module and of every module inside it."""

# Each entry has a role, a pattern of the module's name, and a pattern of the path of the module
# that contains it. The names are those that common families of models use. The first match decides.
_NAMES = (
    ("qkv", r"qkv|qkv_proj|c_attn|query_key_value|in_proj|Wqkv|wqkv|to_qkv", ""),
    ("q", r"q|q_proj|query|wq|q_lin|to_q|q_[ab]_proj", ""),
    ("k", r"k|k_proj|key|wk|k_lin|to_k", ""),
    ("v", r"v|v_proj|value|wv|v_lin|to_v", ""),
    ("out", r"o|o_proj|out_proj|out|out_lin|to_out|c_proj|dense|wo|proj|projection", _INSIDE),
    ("out", r"o|o_proj|out|out_proj|to_out|out_lin", ""),
    ("head", r"lm_head|head|score|classifier|embed_out|output_projection|fc", ""),
    ("head", r"decoder", r"predictions|lm_head"),
    ("gate_up", r"gate_up_proj|gate_up|w13|fc1_gate", ""),
    ("router", r"gate", r"(^|[._])(mlp|moe|ffn|block_sparse_moe|feed_forward)$"),
    ("router", r"router|wg", ""),
    ("router", r"\w+", r"(^|[._])router$"),
    ("gate", r"gate|gate_proj|w1|wi_0", ""),
    ("up", r"up|up_proj|w3|wi|wi_1|fc1|c_fc|dense_h_to_4h|fc_in|lin1|linear1", ""),
    ("up", r"dense", r"(^|[._])intermediate$"),
    ("down", r"down|down_proj|w2|wo|fc2|c_proj|dense_4h_to_h|fc_out|lin2|linear2", ""),
    ("down", r"dense", r"(^|[._])output$"),
    ("experts", r"experts", ""),
    ("attention", r"(self_?|cross_?|linear_)?(attn|attention)|SelfAttention|EncDecAttention", ""),
)


def role_of(path: str, work: Work) -> str:
    """Return the role of a product, one of :data:`sweeps.capture.captured.ROLES`.

    ``path`` is the path of the module that computes the product, such as
    ``layers.0.self_attn.q_proj``. A GEMM gets its role from the path, or the role ``other`` if the
    path matches no known name.
    """
    if isinstance(work, Attention):
        return "attention"
    if isinstance(work, GroupedGemm):
        return "experts"
    if isinstance(work, Conv):
        return "convolution"
    return _role_by_path(path)


def is_head(path: str) -> bool:
    """Return True if the module at a path is an output head, judging by its name."""
    return _role_by_path(path) == "head"


def _role_by_path(path: str) -> str:
    path_without_numbers = re.sub(r"\.\d+\b", "", path)
    parent_path, _, name = path_without_numbers.rpartition(".")
    for role, name_pattern, parent_pattern in _NAMES:
        if re.fullmatch(name_pattern, name) and re.search(parent_pattern, parent_path):
            return role
    return "other"
