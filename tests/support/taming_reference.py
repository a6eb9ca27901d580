"""Transformer and VQGAN of taming-transformers, slow and obvious, with the names that published weights have."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a small checkpoint."""

    width: int = 128
    layers: int = 2
    heads: int = 2
    codes: int = 40
    raster: tuple[int, int] = (4, 4)
    widths: tuple[int, ...] = (32, 64)
    blocks: int = 1
    attention: tuple[int, ...] = (1,)
    latent: int = 24
    entry: int = 12
    channels: int = 3

    @property
    def size(self):
        factor = 2 ** (len(self.widths) - 1)
        return self.raster[0] * factor, self.raster[1] * factor


class SelfAttention(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.heads = heads
        for name in ("key", "query", "value", "proj"):
            setattr(self, name, nn.Linear(width, width))
        self.register_buffer("mask", torch.ones(block, block).tril()[None, None])

    def forward(self, x):
        length = x.shape[1]
        q, k, v = (piece(x).unflatten(-1, (self.heads, -1)) for piece in (self.query, self.key, self.value))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, -torch.inf)
        return self.proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads, block)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        positions = shape.raster[0] * shape.raster[1]
        self.tok_emb = nn.Embedding(shape.codes, shape.width)
        self.pos_emb = nn.Parameter(torch.zeros(1, positions, shape.width))
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads, positions) for _ in range(shape.layers)))
        self.ln_f = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.codes, bias=False)

    def forward(self, tokens):
        x = self.tok_emb(tokens) + self.pos_emb[:, : tokens.shape[1]]
        return self.head(self.ln_f(self.blocks(x)))


def norm(width):
    return nn.GroupNorm(32, width, eps=1e-6)


class Residual(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.norm1, self.conv1 = norm(width), nn.Conv2d(width, out, 3, padding=1)
        self.norm2, self.conv2 = norm(out), nn.Conv2d(out, out, 3, padding=1)
        if width != out:
            self.nin_shortcut = nn.Conv2d(width, out, 1)

    def forward(self, x):
        h = self.conv1(functional.silu(self.norm1(x)))
        h = self.conv2(functional.silu(self.norm2(h)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = norm(width)
        for name in ("q", "k", "v", "proj_out"):
            setattr(self, name, nn.Conv2d(width, width, 1))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (piece(h).flatten(2) for piece in (self.q, self.k, self.v))
        weights = (torch.einsum("bcq,bck->bqk", q, k) / q.shape[1] ** 0.5).softmax(-1)
        return x + self.proj_out(torch.einsum("bqk,bck->bcq", weights, v).unflatten(2, x.shape[2:]))


class Middle(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block_1, self.attn_1, self.block_2 = Residual(width, width), Attention(width), Residual(width, width)

    def forward(self, x):
        return self.block_2(self.attn_1(self.block_1(x)))


class Resample(nn.Module):
    def __init__(self, width, up):
        super().__init__()
        self.up = up
        self.conv = nn.Conv2d(width, width, 3, **({"padding": 1} if up else {"stride": 2}))

    def forward(self, x):
        if self.up:
            return self.conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return self.conv(functional.pad(x, (0, 1, 0, 1)))  # right and below alone


class Level(nn.Module):
    def __init__(self, width, out, blocks, attention, resample=None):
        super().__init__()
        self.block = nn.ModuleList(Residual(out if n else width, out) for n in range(blocks))
        self.attn = nn.ModuleList(Attention(out) for _ in range(blocks if attention else 0))
        if resample:
            setattr(self, resample, Resample(out, resample == "upsample"))
        self.resample = resample

    def forward(self, x):
        for n, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[n](x)
        return getattr(self, self.resample)(x) if self.resample else x


class Encoder(nn.Module):
    def __init__(self, shape):
        super().__init__()
        widths, last = shape.widths, len(shape.widths) - 1
        self.conv_in = nn.Conv2d(shape.channels, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            Level(
                widths[max(level - 1, 0)],
                widths[level],
                shape.blocks,
                level in shape.attention,
                "downsample" if level < last else None,
            )
            for level in range(last + 1)
        )
        self.mid = Middle(widths[-1])
        self.norm_out, self.conv_out = norm(widths[-1]), nn.Conv2d(widths[-1], shape.latent, 3, padding=1)

    def forward(self, x):
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(functional.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    def __init__(self, shape):
        super().__init__()
        widths, last = shape.widths, len(shape.widths) - 1
        self.conv_in = nn.Conv2d(shape.latent, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList(
            Level(
                widths[min(level + 1, last)],
                widths[level],
                shape.blocks + 1,
                level in shape.attention,
                "upsample" if level else None,
            )
            for level in range(last + 1)
        )
        self.norm_out, self.conv_out = norm(widths[0]), nn.Conv2d(widths[0], shape.channels, 3, padding=1)

    def forward(self, x):
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(functional.silu(self.norm_out(x)))


class Quantizer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.codes, shape.entry)


class FirstStage(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.encoder, self.decoder = Encoder(shape), Decoder(shape)
        self.quantize = Quantizer(shape)
        self.quant_conv = nn.Conv2d(shape.latent, shape.entry, 1)
        self.post_quant_conv = nn.Conv2d(shape.entry, shape.latent, 1)
        self.loss = nn.ModuleDict({"discriminator": nn.Linear(3, 2)})

    def encode(self, images):
        """Codes of pixels from 0 to 1."""
        vectors = self.quant_conv(self.encoder(2 * images - 1)).movedim(1, -1)
        return (vectors[..., None, :] - self.quantize.embedding.weight).square().sum(-1).argmin(-1)

    def decode(self, codes):
        """Pixels from 0 to 1."""
        vectors = self.quantize.embedding(codes).movedim(-1, 1)
        return ((self.decoder(self.post_quant_conv(vectors)) + 1) / 2).clamp(0, 1)


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.transformer, self.first_stage_model = Transformer(shape), FirstStage(shape)


def random_model(shape, seed=0):
    """Weights of which none is zero or one, and codes that differ."""
    torch.manual_seed(seed)
    model = Model(shape).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.normal_(1.0 if name.endswith("weight") else 0.0, 0.3)
        elif "emb" in name:
            weight.normal_()
        else:
            weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
    return model
