"""The DataPacker contract, its errors, and the special-token guard."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.hub import eos_token_ids
from posttrain.data.packer import engine_input, init_data_packer, load_packer, read_chat_template, require_packer
from posttrain.errors import EngineStartError, PackerError, PosttrainError
from posttrain.types import Trajectory
from posttrain_datapackers.decoder_only import DecoderOnlyPacker
from posttrain_experiments.tiny import build_tokenizer

BOS, EOS = 1, 2


def write_model(folder: Path, tokenizer: Any, **config: Any) -> str:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1, **config}))
    return str(folder)


def toy_tokenizer(*, bos: bool = False, eos: bool = False, template: str | None = None) -> Any:
    """One id per character; with `bos`/`eos` the tokenizer adds id 1 before and id 2 after a plain text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *"hi[]U/ab"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if bos or eos:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        inner.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return write_model(tmp_path / "tiny", build_tokenizer())


def packer_for(folder: Path, tokenizer: Any) -> DecoderOnlyPacker:
    packer = DecoderOnlyPacker()
    packer.setup(write_model(folder, tokenizer))
    return packer


def test_init_chooses_decoder_only_and_rows_hold_the_sampled_ids(tiny: str) -> None:
    packer = init_data_packer(tiny)
    assert isinstance(packer, DecoderOnlyPacker)
    prompt = packer.get_rollout_input([{"role": "user", "content": "1+1"}])["prompt_ids"]
    assert packer.tokenizer.decode(prompt) == "1+1"
    row = Trajectory(prompt, [5, 6, 1], [True, False, True], [-0.7, 0.0, -1.2], [0, -1, 0], "stop")
    item = packer.get_policy_input(row)
    assert item["input_ids"] == [*prompt, 5, 6, 1]
    assert item["mask"] == [False] * len(prompt) + [True, False, True]
    assert item["rollout_logprobs"][-3:] == [-0.7, 0.0, -1.2]
    assert packer.decode([5, 6, 1]) == packer.tokenizer.decode([5, 6])


def test_packer_pickles_after_setup(tiny: str) -> None:
    packer = pickle.loads(pickle.dumps(init_data_packer(tiny)))
    assert packer.get_rollout_input("1+1=")["prompt_ids"] == packer.tokenizer("1+1=")["input_ids"]


def test_case_mask_1_padding_is_found_by_length_not_by_id(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # both are id 2
    packer = packer_for(tmp_path, tokenizer)
    items = [
        {"input_ids": [5, 6, EOS], "mask": [True, True, True]},
        {"input_ids": [4, 5, 6, 7, 8], "mask": [False, True, True, True, True]},
    ]
    out = packer.policy_collate_fn(items, packer.policy_compute_max_len(items))
    assert out["input_ids"][0].tolist() == [5, 6, EOS, EOS, EOS]
    assert out["mask"][0].tolist() == [True, True, True, False, False]
    assert out["attention_mask"][0].tolist() == [True, True, True, False, False]
    assert out["mask"][1].tolist() == items[1]["mask"]
    assert {t.device.type for t in out.values()} == {"cpu"}


def test_collate_refuses_to_cut_a_row(tiny: str) -> None:
    with pytest.raises(PackerError, match="3 tokens, the batch 2"):
        init_data_packer(tiny).policy_collate_fn([{"input_ids": [1, 2, 3], "mask": [True] * 3}], 2)


TEMPLATE = "{% for m in messages %}[U]{{ m['content'] }}[/U]{% endfor %}"


def test_case_tok_1_bos_exactly_once(tmp_path: Path) -> None:
    packer = packer_for(tmp_path / "a", toy_tokenizer(bos=True, template="<s>" + TEMPLATE))
    templated = packer.get_rollout_input([{"role": "user", "content": "hi"}])["prompt_ids"]
    plain = packer.get_rollout_input("hi")["prompt_ids"]
    spelled = packer.get_rollout_input("<s>hi")["prompt_ids"]
    for ids in (templated, plain, spelled):
        assert ids[0] == BOS and ids.count(BOS) == 1
    both = packer_for(tmp_path / "b", toy_tokenizer(bos=True, eos=True, template="<s>" + TEMPLATE))
    prompt = both.get_rollout_input("hi")["prompt_ids"]
    assert prompt == plain  # the EOS that the tokenizer appends does not end a prompt
    row = both.get_policy_input(Trajectory(prompt, [9, EOS], [True, True], [-1.0, -1.0], [0, 0], "stop"))
    assert row["input_ids"][-2:] == [9, EOS] and row["input_ids"].count(EOS) == 1
    assert row["input_ids"][: len(prompt)] == prompt


def test_e13_fires_for_a_doubled_or_missing_bos_and_not_for_having_one(tmp_path: Path) -> None:
    missing = packer_for(tmp_path / "a", toy_tokenizer(bos=True, template=TEMPLATE))
    with pytest.raises(PackerError, match="packer tokenizer adds special tokens") as caught:
        missing.get_rollout_input([{"role": "user", "content": "hi"}])
    assert "miss" in caught.value.cause and caught.value.code == "E13"
    with pytest.raises(PackerError, match="packer tokenizer adds special tokens") as caught:
        missing.get_rollout_input([BOS, BOS, 4])
    assert "twice" in caught.value.cause
    harmless = packer_for(tmp_path / "b", toy_tokenizer(template=TEMPLATE))  # it has a BOS and adds none
    assert BOS not in harmless.get_rollout_input([{"role": "user", "content": "hi"}])["prompt_ids"]
    harmless.special_tokens.check_text()
    with pytest.raises(PackerError, match="packer tokenizer adds special tokens"):
        missing.special_tokens.check_text()
    with pytest.raises(PackerError, match="twice"):
        harmless.special_tokens.check_ending([5, 1, 1])  # 1 is the id that this model's config.json stops at


def test_the_guard_holds_for_every_packer(tmp_path: Path) -> None:
    class Careless(DecoderOnlyPacker):
        """A packer of somebody else's that checks nothing; ids are returned as they are asked for."""

        def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
            return {"prompt_ids": prompt}

    plain, adding = Careless(), Careless()
    plain.setup(write_model(tmp_path / "a", toy_tokenizer()))
    adding.setup(write_model(tmp_path / "b", toy_tokenizer(bos=True)))
    assert engine_input(adding, [BOS, 4])["prompt_ids"] == [BOS, 4] and engine_input(plain, [4])["prompt_ids"] == [4]
    for prompt, cause in (([BOS, BOS, 4], "twice"), ([4], "miss"), ("hi", "text handed to an engine")):
        with pytest.raises(PackerError, match="packer tokenizer adds special tokens") as caught:
            engine_input(adding, prompt)
        assert cause in caught.value.cause and caught.value.code == "E13"
    for prompt in ("hi", [], None):
        with pytest.raises(PackerError, match="Careless.get_rollout_input returned no ids"):
            engine_input(plain, prompt)


def test_no_chat_template_names_the_key_and_a_file_supplies_one(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    folder = write_model(tmp_path / "m", tokenizer)
    with pytest.raises(PackerError, match=r"model\.chat_template"):
        init_data_packer(folder).get_rollout_input([{"role": "user", "content": "hi"}])
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    asked = [{"role": "user", "content": "hi"}]
    from_file = init_data_packer(folder, chat_template=str(file)).get_rollout_input(asked)
    assert from_file == init_data_packer(folder, chat_template=TEMPLATE).get_rollout_input(asked)
    with pytest.raises(PackerError, match="neither a Jinja template nor a readable file"):
        read_chat_template(str(tmp_path / "absent.jinja"))
    with pytest.raises(PackerError, match="chat template"):
        init_data_packer(folder, chat_template="{{ raise_exception('no') }}").get_rollout_input(asked)


@pytest.mark.parametrize("prompt", [None, [], "", 3, [1.5]])
def test_a_prompt_of_another_type_is_named(tiny: str, prompt: Any) -> None:
    with pytest.raises(PackerError, match="prompt"):
        init_data_packer(tiny).get_rollout_input(prompt)


def test_e11_e12_e14_and_absent_models(tmp_path: Path) -> None:
    with pytest.raises(PackerError, match="DataPacker.setup: empty name_or_path"):
        init_data_packer("")
    with pytest.raises(PackerError, match="DataPacker.setup: empty name_or_path"):
        DecoderOnlyPacker().setup("")
    vision = write_model(tmp_path / "v", toy_tokenizer(), model_type="some_vl", vision_config={"depth": 1})
    with pytest.raises(PackerError, match="model_type='some_vl' declares vision_config but has no native packer") as caught:
        init_data_packer(vision)
    assert caught.value.code == "E11"
    with pytest.raises(PackerError, match="Loop requires a DataPacker at construction"):
        require_packer(None, "Loop")
    with pytest.raises(EngineStartError, match="was not found"):
        init_data_packer(str(tmp_path / "nothing"))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(PackerError, match="tokenizer of .* cannot be loaded"):
        init_data_packer(str(tmp_path / "bare"))
    with pytest.raises(PackerError, match="encoder-decoder"):
        init_data_packer(write_model(tmp_path / "t5", toy_tokenizer(), model_type="t5", is_encoder_decoder=True))


def test_a_packer_plug_in_named_like_the_model_type_is_the_model_s_packer(
    tmp_path: Path, fake_distribution: Callable[..., object]
) -> None:
    source = "from posttrain_datapackers.decoder_only import DecoderOnlyPacker\nclass Vision(DecoderOnlyPacker):\n    pass\n"
    fake_distribution(
        "vision", points={"posttrain.datapackers": {"some_vl": "vision_packer:Vision"}}, files={"vision_packer.py": source}
    )
    folder = write_model(tmp_path / "v", toy_tokenizer(), model_type="some_vl", vision_config={"depth": 1})
    assert type(init_data_packer(folder)).__name__ == "Vision"
    assert type(init_data_packer(write_model(tmp_path / "t", toy_tokenizer()))) is DecoderOnlyPacker
    other = write_model(tmp_path / "o", toy_tokenizer(), model_type="other_vl", vision_config={"depth": 1})
    with pytest.raises(PackerError, match="model_type='other_vl' declares vision_config") as caught:
        init_data_packer(other)
    assert "some_vl" in caught.value.cause


def test_e9_e10_and_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_packers.py").write_text(
        "from posttrain_datapackers.decoder_only import DecoderOnlyPacker\n"
        "class Mine(DecoderOnlyPacker):\n    pass\n"
        "def make():\n    return Mine()\n"
        "def wrong():\n    return {}\n"
        "def needs(model):\n    return Mine()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for ref in ("user_packers:make", "user_packers.make", "user_packers:Mine"):
        first, second = load_packer(ref), load_packer(ref)
        assert type(first).__name__ == "Mine" and first is not second
    assert type(load_packer("decoder_only")) is DecoderOnlyPacker
    with pytest.raises(PackerError, match="Unable to import DataPacker factory 'absent_pkg.packers:make'") as caught:
        load_packer("absent_pkg.packers:make")
    assert "absent_pkg" in caught.value.cause and caught.value.code == "E9"
    with pytest.raises(PackerError, match="Unable to import DataPacker factory 'user_packers:nothing'"):
        load_packer("user_packers:nothing")
    with pytest.raises(PackerError, match="DataPacker factory 'user_packers:wrong' must return a DataPacker"):
        load_packer("user_packers:wrong")
    with pytest.raises(PackerError, match="without arguments"):
        load_packer("user_packers:needs")
    with pytest.raises(PosttrainError, match="decoder_only"):
        load_packer("decoder_onl")


def test_case_tok_3_the_next_turn_keeps_the_sampled_ids(tmp_path: Path) -> None:
    """The vocabulary has a merged token `ab`, which re-encoding the text would prefer over the sampled `a`, `b`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "a", "b", "[", "]", "ab", "u", *"lst-word"])}
    vocabulary = {w: i for i, w in enumerate(vocabulary)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + '</s>' }}"
        "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    packer = packer_for(tmp_path, tokenizer)
    prompt = packer.get_rollout_input([{"role": "user", "content": "u"}])["prompt_ids"]
    assert packer.encode("ab") == [vocabulary["ab"]]
    stopped = packer.extend([*prompt, 3, 4, 2], [{"role": "user", "content": "ab"}])
    assert stopped == [*prompt, 3, 4, 2, vocabulary["["], vocabulary["ab"], vocabulary["]"]]
    cut = packer.extend([*prompt, 3, 4], [{"role": "user", "content": "u"}])  # truncated: the stop token is added, once
    assert cut == [*prompt, 3, 4, 2, vocabulary["["], vocabulary["u"], vocabulary["]"]]


def test_extend_refuses_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    packer = packer_for(tmp_path, toy_tokenizer(template="{{ messages[-1]['content'] }}{{ messages | length }}"))
    with pytest.raises(PackerError, match="rewrites earlier turns"):
        packer.extend([4], [{"role": "user", "content": "hi"}])


def test_every_eos_id_is_found_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path, toy_tokenizer(), eos_token_id=7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert eos_token_ids(folder) == (5, 7)
    assert eos_token_ids(folder, toy_tokenizer()) == (5, 7, 2)
