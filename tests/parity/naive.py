"""The model once more, written straight from its definition: NumPy, float64, a loop over tokens, no cache, no tricks.

It shares no code with the package, so that the two can be wrong only in different ways.
"""

import math

import numpy as np


def slopes(heads: int) -> list[float]:
    def powers(count: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / count) for i in range(count)]

    if heads & (heads - 1) == 0:
        return powers(heads)
    below = 1
    while below * 2 <= heads:
        below *= 2
    return powers(below) + [s for i, s in enumerate(powers(2 * below)) if i % 2 == 0][: heads - below]


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotate(x, position, theta):
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


class NaiveModel:
    def __init__(self, config: dict, weights: dict) -> None:
        self.c = config
        self.w = {name: value.astype(np.float64) for name, value in weights.items()}

    def logits(self, ids: list[int], prompt_len: int) -> np.ndarray:
        c, w = self.c, self.w
        x = w["model.embed_tokens.weight"][ids] * c["scale_emb"]
        r = c["scale_depth"] / math.sqrt(c["num_hidden_layers"])
        for i, kind in enumerate(c["mixer_types"]):
            p = f"model.layers.{i}."
            h = norm(x, w[p + "input_layernorm.weight"], c["rms_norm_eps"])
            mix = self.lightning if kind == "lightning-attn" else self.sparse
            x = x + r * mix(h, p + "self_attn.", prompt_len)
            h = norm(x, w[p + "post_attention_layernorm.weight"], c["rms_norm_eps"])
            gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
            x = x + r * ((gate * sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T)
        x = norm(x, w["model.norm.weight"], c["rms_norm_eps"]) / (c["hidden_size"] / c["dim_model_base"])
        head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        return x @ w[head].T

    def project(self, h, name, heads, dim):
        out = h @ self.w[name].T
        if self.c.get("attention_bias"):
            out = out + self.w[name.replace(".weight", ".bias")]
        return out.reshape(len(h), heads, dim)

    def lightning(self, h, p, prompt_len):
        c, w = self.c, self.w
        heads, kv, dim = c["lightning_nh"], c["lightning_nkv"], c["lightning_head_dim"]
        q = self.project(h, p + "q_proj.weight", heads, dim)
        k = self.project(h, p + "k_proj.weight", kv, dim)
        v = self.project(h, p + "v_proj.weight", kv, dim)
        if c["qk_norm"]:
            q, k = (
                norm(q, w[p + "q_norm.weight"], c["rms_norm_eps"]),
                norm(k, w[p + "k_norm.weight"], c["rms_norm_eps"]),
            )
        out = np.zeros((len(h), heads, dim))
        for head, s in enumerate(slopes(heads)):
            state = np.zeros((dim, dim))
            for t in range(len(h)):
                qt, kt, vt = q[t, head], k[t, head * kv // heads], v[t, head * kv // heads]
                if c["lightning_use_rope"]:
                    qt, kt = rotate(qt, t, c["rope_theta"]), rotate(kt, t, c["rope_theta"])
                state = math.exp(-s) * state + np.outer(kt, vt)
                out[t, head] = qt / math.sqrt(dim) @ state
        out = out.reshape(len(h), -1)
        if c["use_output_norm"]:
            out = norm(out, w[p + "o_norm.weight"], c["rms_norm_eps"])
        if c["use_output_gate"]:
            out = out * sigmoid(h @ w[p + "z_proj.weight"].T)
        return out @ w[p + "o_proj.weight"].T

    def sparse(self, h, p, prompt_len):
        c, s = self.c, self.c["sparse_config"]
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q = self.project(h, p + "q_proj.weight", heads, dim)
        k = self.project(h, p + "k_proj.weight", kv, dim)
        v = self.project(h, p + "v_proj.weight", kv, dim)
        if c.get("attn_qk_norm"):
            q = norm(q, self.w[p + "q_norm.weight"], c["rms_norm_eps"])
            k = norm(k, self.w[p + "k_norm.weight"], c["rms_norm_eps"])
        if c["attn_use_rope"]:
            q = np.stack([rotate(q[t], t, c["rope_theta"]) for t in range(len(h))])
            k = np.stack([rotate(k[t], t, c["rope_theta"]) for t in range(len(h))])
        if c.get("attn_log_base"):
            a = c["attn_log_base"]
            q = np.stack([q[t] * math.log(t + a) / math.log(a) for t in range(len(h))])
        out = np.zeros((len(h), heads, dim))
        group = heads // kv
        for t in range(len(h)):
            kv_len = prompt_len if t < prompt_len else t + 1
            for g in range(kv):
                mine = range(g * group, (g + 1) * group)
                if kv_len < s["dense_len"]:
                    tokens = list(range(t + 1))
                else:
                    blocks = self.select(q[t, g * group : (g + 1) * group], k[: t + 1, g], s)
                    tokens = [j for j in range(t + 1) if j // s["block_size"] in blocks]
                for head in mine:
                    score = k[tokens, g] @ q[t, head] / math.sqrt(dim)
                    weight = np.exp(score - score.max())
                    out[t, head] = weight @ v[tokens, g] / weight.sum()
        out = out.reshape(len(h), -1)
        if c["attn_use_output_gate"]:
            out = out * sigmoid(h @ self.w[p + "o_gate.weight"].T)
        return out @ self.w[p + "o_proj.weight"].T

    def select(self, q, keys, s) -> set[int]:
        """q: the group's heads at the last of the positions that `keys` covers."""
        size, stride, block = s["kernel_size"], s["kernel_stride"], s["block_size"]
        position = len(keys) - 1
        own = position // block
        fine = [keys[j : j + size].mean(0) for j in range(0, len(keys) - size + 1, stride)]
        coarse = [keys[j : j + 4 * size].mean(0) for j in range(0, len(keys) - 4 * size + 1, 4 * stride)]
        score = [0.0] * (own + 1)
        if coarse:
            scale = math.sqrt(q.shape[-1])
            lse = np.log(np.exp(q @ np.stack(coarse).T / scale).sum(-1, keepdims=True))
            windows = np.exp(q @ np.stack(fine).T / scale - lse).sum(0)
            for b in range(own + 1):
                touching = [
                    j for j in range(len(fine)) if j * stride < (b + 1) * block and j * stride + size > b * block
                ]
                score[b] = max((windows[j] for j in touching), default=0.0)
        local = s["window_size"] // block
        forced = [b for b in range(own + 1) if b < s["init_blocks"] or b >= own - local]
        rest = sorted((b for b in range(own + 1) if b not in forced), key=lambda b: (-score[b], b))
        return set((forced + rest)[: s["topk"] + local])
