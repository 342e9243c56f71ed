"""A Llama in plain torch, with the parameter names of transformers, for training on any machine."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model; the defaults are the committed one's."""

    vocab_size: int
    num_layers: int = 6
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 192
    rope_theta: float = 10000.0
    max_positions: int = 2048
    norm_eps: float = 1e-5

    def hf_config(self) -> dict[str, object]:
        """Return the config.json that transformers and SGLang read."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


@dataclass(frozen=True, slots=True)
class Guides:
    """Where some rows of one layer's attention should look: int64 [n] each."""

    head: torch.Tensor
    batch: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions, as Llama has it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        guides: Guides | None,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; with guides also return the cross-entropy of the guided rows' attention."""
        batch, length, _ = x.shape
        dim = self.shape.head_dim
        q = self.q_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.num_heads // self.shape.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
        out = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out, None if guides is None else _guide_loss(q, k, guides)


def _guide_loss(q: torch.Tensor, k: torch.Tensor, guides: Guides) -> torch.Tensor:
    loss = q.new_zeros(())
    for head in sorted(set(guides.head.tolist())):
        mine = guides.head == head
        query = guides.query[mine]
        scores = (q[:, head] @ k[:, head].transpose(1, 2))[guides.batch[mine], query]
        later = torch.arange(k.shape[2], device=k.device) > query[:, None]
        logits = (scores.float() / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        loss = loss + F.cross_entropy(logits, guides.key[mine], reduction="sum")
    return loss / max(1, guides.head.numel())


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to [..., hidden_size]."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        guides: Guides | None,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output and the loss of its guided rows."""
        mixed, loss = self.self_attn(self.input_layernorm(x), cos, sin, guides, seen)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), loss


class TinyLlama(nn.Module):
    """Causal language model with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        # The residual stream begins as the embedding alone, loud enough to be heard in every layer.
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        nn.init.constant_(self.norm.weight, 0.5)
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(
        self,
        tokens: torch.Tensor,
        guides: dict[int, Guides] | None = None,
        seen: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits and guide loss.

        Args:
            tokens: int64 [batch, length].
            guides: Per layer the rows whose attention is supervised.
            seen: bool [batch, 1, length, length], which keys (last) each query sees; by default all
                up to its own.

        Returns:
            Logits [batch, length, vocab] and the guide loss of each layer, [num_layers].
        """
        x = self.embed_tokens(tokens)
        cos, sin = rope_tables(self.shape, tokens.shape[1], tokens.device)
        losses = []
        for number, layer in enumerate(self.layers):
            guide = None if guides is None else guides.get(number)
            x, loss = layer(x, cos, sin, guide, seen)
            losses.append(x.new_zeros(()) if loss is None else loss)
        return F.linear(self.norm(x), self.embed_tokens.weight), torch.stack(losses)


def rope_tables(
    shape: Shape, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 [length, head_dim], in the halved (NeoX) layout."""
    exponent = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device), shape.rope_theta**-exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [batch, heads, length, head_dim] to its positions."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


def seen_in_blocks(tokens: torch.Tensor, chunk: int, ask: int) -> torch.Tensor:
    """Tell which keys each query sees if chunks see only themselves, as in Block-Attention.

    Args:
        tokens: int64 [batch, length].
        chunk: Token that begins a chunk.
        ask: Token that begins a question; from the first one on everything before is seen.

    Returns:
        bool [batch, 1, length, length].

    Source: D. Ma et al., "Block-Attention for Efficient Prefilling" (ICLR 2025).
    """
    block = (tokens == chunk).cumsum(1)
    asks = (tokens == ask).cumsum(1) > 0
    same = block[:, :, None] == block[:, None, :]
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return ((same | asks[:, :, None]) & causal.tril())[:, None]


def save_hf(model: TinyLlama, folder: Path) -> None:
    """Write model.safetensors and config.json as transformers and SGLang load them."""
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": value.detach().float().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.shape.hf_config()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_hf(model: TinyLlama, folder: Path) -> None:
    """Read the weights that ``save_hf`` wrote."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()})


def shape_of(settings: dict[str, object]) -> Shape:
    """Rebuild a shape from what ``shape_settings`` returned."""
    return Shape(**settings)  # type: ignore[arg-type]


def shape_settings(shape: Shape) -> dict[str, object]:
    """Return a shape as plain values, for a checkpoint."""
    return asdict(shape)
