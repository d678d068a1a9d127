#!/usr/bin/env python3
"""Writes components.json: what Hugging Face tokenizers answers for single components and for small tokenizers with every flag.

Run by hand when a component is added: python make_components.py TEXT > components.json,
      TEXT being any English text of some 100 KB that the
small vocabularies are trained on (the file at hand was made with tokenizers 0.23 and a public-domain novel).
"""
import json
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

rng = random.Random(5)
corpus = open(sys.argv[1], encoding="utf-8").read()[:200000]
SAMPLES = ["", " ", "  ", "Hello world", " Hello  World 12345 ", "a\u3000b\u00a0c\u2003d", "it's I'LL we'Ve 'x '",
      "x\n\n  y\t\tz\n", "\r\n\r\n  end  ",
           "3.14 \u0663\u0664 \u00bd \u2167!", "caf\u00e9 cafe\u0301 \ud55c\uad6d \u1112\u1161\u11ab",
                 "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\U0001f600\u200d\U0001f468 ok",
           "foo_bar-baz... ---", "\u2581a \u2581\u2581b", "$1,000.00+2=^`|~<>", "a\u0323\u0307 a\u0307\u0323 \u212b \u1e9b\u0323",
                 "'\u017f '\u017ft", "\x00\x01\x7f", "\u00e9", "\ufeffbom \u180e \u0085x",
           "<s>hi</s> <mask> <mask>x", "xx <pad>  <pad>yy <word> a<word>b", "<special><special> <S\u0301>"]
ALPHABET = list("aaabBzZ019 \n\r\t'.,-_!$+  ") + ["\u00e9", "\u0301", "\u4e2d", "\u3000", "\u0663", "\u00bd", "\u017f", "\u2581",
      "\U0001f600", "\uac00", "\u11a8", "'s", "'LL", "<s>", "<pad>", "\u0323"]
RANDOM = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 24))) for _ in range(40)]
TEXTS = SAMPLES + RANDOM


def alias_table():
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = [b for b in range(256) if b not in plain]
  return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


ALIAS = alias_table()


def raw(piece):
  return bytes(ALIAS[c] for c in piece).decode("utf-8")


def config(component):
  return json.loads(component.__getstate__())


def pretok(component, is_byte_level=False):
  rows = []
  for text in TEXTS:
    pieces = [p for p, _ in component.pre_tokenize_str(text)]
    rows.append([raw(p) for p in pieces] if is_byte_level else pieces)
  return {"config": config(component), "cases": rows}


P = pre_tokenizers
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BEHAVIORS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
pre = [P.Split(Regex(p), b, invert=i) for p in (r"\p{N}", r"[\s,.]+", "a|b", r"\s*") for b in BEHAVIORS for i in (False, True)]
pre += [P.Split(Regex(p), b, invert=i) for p in (GPT2, LLAMA3) for b, i in (("isolated", False), ("removed", True), ("contiguous",
      False))]
pre += [P.Split(Regex(p), "isolated") for p in (LLAMA3.replace("{1,3}", ""), r"\s+$", r"\p{N}+", r"\p{N}{1,3}", r"^\S+",
      r"[^\s\d]+", r"\w+", r"[\w'-]+", r"\W")]
pre += [P.Split(" ", b) for b in BEHAVIORS] + [P.Split("aa", "isolated"), P.Split(".", "merged_with_previous")]
pre += [P.Digits(True), P.Digits(False), P.WhitespaceSplit()] + [P.Punctuation(b) for b in BEHAVIORS]
pre += [P.Metaspace("\u2581", scheme, split) for scheme in ("always", "never", "first") for split in (True, False)]
pre += [P.Sequence([P.Digits(True), P.Split(" ", "merged_with_next")]), P.Sequence([P.WhitespaceSplit(), P.Metaspace("\u2581", "first")])]
out = {"texts": [TEXTS], "pretok": [pretok(c) for c in pre]}
byte_level = [P.ByteLevel(add_prefix_space=a, use_regex=r) for a in (False, True) for r in (False, True)]
byte_level += [P.Sequence([P.Digits(True), P.ByteLevel(add_prefix_space=True)])]
out["pretok"] += [pretok(c, True) for c in byte_level]

N = normalizers
norms = [N.NFC(), N.NFD(), N.Prepend("\u2581"), N.Replace(" ", "\u2581"), N.Replace("aa", "b"), N.Strip(), N.Strip(left=False),
      N.Strip(right=False),
         N.Sequence([N.NFD(), N.Replace("\u0301", ""), N.NFC()]), N.Sequence([N.Prepend(" "), N.Replace(" ", "__")])]
MARKS = [chr(c) for c in (0x61, 0x65, 0x1112, 0x1161, 0x11ab, 0xac00, 0x300, 0x301, 0x302, 0x323, 0x327, 0x345, 0x4e0, 0x915,
      0x93c, 0x958, 0x1e9b, 0x212b, 0x2126,
                          0xf900, 0x2f800, 0x1d15e, 0x3099, 0x304b, 0xb95, 0xbc7, 0xbbe, 0x10a1, 0x11099, 0x110ba, 0x1100, 0x344,
                                0x37e, 0x1f80, 0x20)]
mark_texts = ["".join(rng.choice(MARKS) for _ in range(rng.randint(1, 14))) for _ in range(300)] + [chr(0x61) + "\u0323\u0301" * 40 + "b"]
out["norm"] = [{"config": config(n), "cases": [[t, n.normalize_str(t)] for t in TEXTS + (mark_texts if i < 2 else [])]} for i,
      n in enumerate(norms)]


def tokenizer(t):
  rows = []
  for text in TEXTS:
    t.encode_special_tokens = False
    ids = t.encode(text, add_special_tokens=False).ids
    added = t.encode(text).ids
    t.encode_special_tokens = True
    plain = t.encode(text, add_special_tokens=False).ids
    rows.append([text, ids, added, plain, t.decode(ids, skip_special_tokens=False), t.decode(ids, skip_special_tokens=True)])
  t.encode_special_tokens = False
  return {"json": json.loads(t.to_str()), "cases": rows}


def trained(model, trainer, pre=None, norm=None, decoder=None, post=None, added=()):
  t = Tokenizer(model)
  if norm: t.normalizer = norm
  if pre: t.pre_tokenizer = pre
  t.train_from_iterator([corpus], trainer)
  if decoder: t.decoder = decoder
  for token in added:
    (t.add_special_tokens if token.special else t.add_tokens)([token])
  if post: t.post_processor = post(t)
  return t


def byte_trainer(n, special=()):
  return trainers.BpeTrainer(vocab_size=n, initial_alphabet=P.ByteLevel.alphabet(), special_tokens=list(special), show_progress=False)


FLAGS = [AddedToken("<s>", special=True), AddedToken("</s>", special=True, normalized=True), AddedToken("<mask>", lstrip=True,
      special=True),
         AddedToken("<pad>", rstrip=True, special=False, normalized=False), AddedToken("<word>", single_word=True, special=False),
         AddedToken("aab", special=False, normalized=False), AddedToken("Hello", special=False, normalized=True),
         AddedToken("caf\u00e9", special=False, normalized=True), AddedToken("<special>", special=True, single_word=True),
               AddedToken("  ", special=False, normalized=False)]


def wrap(t):
  s, e = t.token_to_id("<s>"), t.token_to_id("</s>")
  return processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", s), ("</s>", e)])


spm = lambda: N.Sequence([N.Prepend("\u2581"), N.Replace(" ", "\u2581")])
spm_decoder = lambda: decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
      decoders.Strip(" ", 1, 0)])
char_trainer = lambda n: trainers.BpeTrainer(vocab_size=n, special_tokens=["<unk>"], show_progress=False)
BYTES = ["<0x%02X>" % b for b in range(256)]
ts = [
    trained(models.BPE(), byte_trainer(420), P.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel()),
    trained(models.BPE(), byte_trainer(420), P.ByteLevel(add_prefix_space=True), N.NFC(), decoders.ByteLevel(), wrap, FLAGS),
    trained(models.BPE(ignore_merges=True), byte_trainer(500), P.Sequence([P.Split(Regex(LLAMA3), "isolated"), P.ByteLevel(False,
          use_regex=False)]),
            decoder=decoders.ByteLevel(), post=wrap, added=FLAGS),
    trained(models.BPE(unk_token="<unk>", fuse_unk=True), char_trainer(300), P.Metaspace(), decoder=decoders.Metaspace(),
          post=wrap, added=FLAGS),
    trained(models.BPE(unk_token="<unk>"), char_trainer(300), P.Metaspace(prepend_scheme="never", split=False),
          decoder=decoders.Metaspace(prepend_scheme="never")),
    trained(models.BPE(), char_trainer(200), P.Digits(True), N.NFD(), decoders.Fuse()),
    trained(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
            trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"] + BYTES, show_progress=False), None, spm(),
                  spm_decoder(), wrap),
]
for t in ts[-1:]:  # byte tokens are no added tokens in real files
  state = json.loads(t.to_str())
  state["added_tokens"] = [a for a in state["added_tokens"] if not a["content"].startswith("<0x")]
  ts[-1] = Tokenizer.from_str(json.dumps(state))
out["tokenizers"] = [tokenizer(t) for t in ts]
print("{")
for i, (key, rows) in enumerate(out.items()):
  print(f'"{key}": [')
  print(",\n".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) for r in rows))
  print("]," if i + 1 < len(out) else "]")
print("}")
