"""Every form that instructions lie in, read and refused."""

import hashlib
import json
from pathlib import Path

import datasets
import pytest

from upcycle_core.corpora.families.catalogue import FAMILIES
from upcycle_core.corpora.tuning import superni
from upcycle_core.corpora.tuning.config import InstructionsConfig, InstructionSource
from upcycle_core.corpora.tuning.prepare import instruction_faults, prepare_instructions
from upcycle_core.corpora.tuning.readers import read_records
from upcycle_core.corpora.tuning.records import LeftOut, Record
from upcycle_core.errors import Fault
from upcycle_core.evaluation.tasks.superni import superni_items

CONFIG = InstructionsConfig(generated_per_family=3)
TASK = {
    "Definition": ["Add two numbers", "never read"],
    "Categories": ["Sums", "Other"],
    "Positive Examples": [{"input": "1 and 2", "output": "3", "explanation": "easy"}] * 3,
    "Instances": [
        {"id": "t1-a", "input": "4 and 1", "output": ["5", "five", "5"]},
        {"id": "t1-b", "input": "2 and 2", "output": ["4"]},
    ],
}
PROMPT = (
    "Definition: Add two numbers.\n\n"
    " Positive Example 1 -\nInput: 1 and 2.\n Output: 3.\n\n"
    " Positive Example 2 -\nInput: 1 and 2.\n Output: 3.\n\n"
    "Now complete the following example -\nInput: 4 and 1.\nOutput:"
)


def read(source, *, folder=None, seed=0):
    found = read_records("own", source, folder=folder, seed=seed, config=CONFIG)
    faults = (one.fault if isinstance(one, LeftOut) else one for one in found)
    return [str(one) if isinstance(one, Fault) else one for one in faults]


def jsonl(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def files(*paths, **settings):
    return InstructionSource(files=tuple(map(str, paths)), **settings)


@pytest.mark.parametrize(
    ("record", "prompt", "references"),
    [
        ({"prompt": "a", "response": "b"}, "a", ("b",)),
        ({"prompt": "a", "response": "b", "references": ["c", "b"]}, "a", ("b", "c")),
        ({"prompt": "a", "answer": ["b", "c"]}, "a", ("b", "c")),
        ({"prompt": "a", "answer": ["", "b", " "]}, "a", ("b",)),
        ({"prompt": "a", "answer": "b", "answers": ["b", "c"]}, "a", ("b", "c")),
        ({"instruction": "a", "input": "x", "output": "b"}, "a\n\nx", ("b",)),
        ({"instruction": "a", "input": " \n", "output": "b"}, "a", ("b",)),
        ({"instruction": "a", "context": "x", "response": "b"}, "a\n\nx", ("b",)),
        ({"instruction": "a", "context": "", "input": "x", "output": "b"}, "a\n\nx", ("b",)),
        ({"prompt": "a", "response": "b", "system": " ", "history": []}, "a", ("b",)),
        ({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "a"},
                       {"role": "assistant", "content": "b"}]}, "a", ("b",)),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "a", ("b",)),
    ],
)  # fmt: skip
def test_records_of_every_form(tmp_path, record, prompt, references):
    (found,) = read(files(jsonl(tmp_path / "a.jsonl", record)))
    assert found == Record("own", "own", None, prompt, references)


def test_labels_of_a_record_come_before_the_source_s(tmp_path):
    file = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response": "b", "category": "C", "domain": "D", "task": "T", "id": 7},
    )
    plain, labelled = read(files(file, category="c", domain="d"))
    assert (plain.task, plain.category, plain.domain, plain.id) == ("c", "c", "d", None)
    assert (labelled.task, labelled.category, labelled.domain, labelled.id) == ("T", "C", "D", "7")
    other = jsonl(tmp_path / "b.jsonl", {"prompt": "a", "response": "b", "source": "s"})
    assert read(files(other, category_field="source"))[0].category == "s"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "response": " \n"}, "line 1, response = ' \\n': must be text"),
        ({"prompt": "a", "answer": []}, "line 1, answer = None: must be text"),
        ({"prompt": "a", "answer": ["b", 3]}, "line 1, answer = ['b', 3]: must be a list"),
        ({"prompt": "a", "response": "b", "references": "b"}, "line 1, references = 'b': must be"),
        ({"prompt": "a", "response": "b", "category": 3}, "line 1, category = 3: must be text"),
        ({"prompt": "a", "response": "b", "task": "\ud83d"}, r"line 1, task = '\ud83d': must be"),
        ({"prompt": "a", "response": "b", "references": ["\ud83d"]}, "line 1, references = "),
        ({"text": "a"}, "line 1, prompt = ['text']: the record has none of"),
        ({"prompt": "a", "input": "x", "context": "y", "response": "b"},
         "line 1, input = ['prompt', 'input', 'context', 'response']: the record has both input "
         "and context; "),
        ({"prompt": "a", "context": {"title": "x"}, "response": "b"}, "line 1, context = {'title'"),
        ({"prompt": "a", "system": 3, "response": "b"}, "line 1, system = 3: must be text"),
        ({"prompt": "a", "history": "hi", "response": "b"}, "line 1, history = 'hi': must be a "
         "list of [question, answer]; mend it or take it out"),
        ({"prompt": "a", "history": [["hi"]], "response": "b"}, "line 1, history = [['hi']]: must"),
        ({"prompt": "a", "history": [["hi", "yo"], ["so", 3]], "response": "b"},
         "line 1, history[1], content = 3: must be text"),
    ],
)  # fmt: skip
def test_a_faulty_record_is_named_with_file_line_and_field(tmp_path, record, message):
    (found,) = read(files(jsonl(tmp_path / "a.jsonl", record)))
    assert found.startswith(f"{tmp_path}/a.jsonl, {message}")


def test_a_system_message_and_earlier_turns_stand_before_the_prompt(tmp_path):
    """Right answers of the prompt are none of the first turn, which models are judged by."""
    before = {"system": "be kind", "history": [["hi", "yo"]]}
    row = {**before, "prompt": "a", "answer": ["b", "c"]}
    said = [("system", "be kind"), ("user", "hi"), ("assistant", "yo")]
    said += [("user", "a"), ("assistant", "b")]
    as_messages = {"messages": [{"role": role, "content": text} for role, text in said]}
    found, expected = read(files(jsonl(tmp_path / "a.jsonl", row, as_messages)))
    assert found == expected
    assert [message["content"] for message in found.messages] == [text for _, text in said]
    assert found.references == ("yo",)


EMPTY_ANSWERS = {
    "response": [{"prompt": "q", "response": " "}, {"prompt": "q", "response": None}],
    "output": [{"instruction": "q", "output": ""}, {"prompt": "q", "answer": []}],
    "messages": [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]}
        for said in ("", None)
    ],
}


@pytest.mark.parametrize("form", EMPTY_ANSWERS)
def test_few_empty_answers_are_left_out_and_counted_and_many_are_told(tmp_path, form):
    rows = [{"prompt": f"q {i}", "response": "a", "category": "cu"[i % 2]} for i in range(38)]
    few = InstructionsConfig(
        sources={"own": files(jsonl(tmp_path / "a.jsonl", *rows, *EMPTY_ANSWERS[form]))},
        unseen=("u",),
    )
    assert instruction_faults(few, folder=None) == []
    prepare_instructions(few, tmp_path / "out", seed=0)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["left_out"]["an empty answer"] == 2
    assert sum(file["instances"] for file in manifest["files"].values()) == 38
    jsonl(tmp_path / "a.jsonl", *rows, *EMPTY_ANSWERS[form], EMPTY_ANSWERS[form][0])
    faults = instruction_faults(few, folder=None)
    assert len(faults) == 3
    assert f"{tmp_path}/a.jsonl, line 39, " in str(faults[0])


def test_a_system_message_that_holds_tools_stays_though_it_says_nothing(tmp_path):
    """An instance of a superni task without an answer is left out too."""
    system = {"role": "system", "content": "", "tools": [{"name": "add"}], "tool_calls": [{}]}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (record,) = read(files(jsonl(tmp_path / "a.jsonl", {"messages": [system, *said]})))
    assert [message["role"] for message in record.asked] == ["system", "user"]
    instances = [{"input": "a", "output": ["", "b"]}, {"input": "c", "output": [""]}]
    (tmp_path / "a.json").write_text(json.dumps({**TASK, "Instances": instances}))
    task = files(tmp_path / "a.json", form="superni")
    empty, record = read_records("own", task, folder=None, seed=0, config=CONFIG)
    assert record.references == ("b",)
    assert (empty.reason, empty.records) == ("an empty answer", 1)


def test_families_are_generated_with_the_seed():
    source = InstructionSource(generate="families")
    first = read(source, seed=1)
    assert len(first) == 3 * len(FAMILIES)
    assert read(source, seed=1) == first
    prompts = {record.prompt for record in first}
    assert len(prompts & {record.prompt for record in read(source, seed=2)}) < len(prompts) / 4


def test_published_task_files_are_read(tmp_path):
    (tmp_path / "task1_add.json").write_text(json.dumps(TASK))
    (tmp_path / "task2_skip.json").write_text(json.dumps(TASK))
    (tmp_path / "train_tasks.txt").write_text("task1_add\n\ntask9_none\n")
    source = InstructionSource(
        files=("{folder}/task*.json",), form="superni", task_lists=("{folder}/train_tasks.txt",)
    )
    first, second = read(source, folder=tmp_path)
    assert first == Record("task1_add", "Sums", None, PROMPT, ("5", "five"), "t1-a")
    assert second.references == ("4",)
    both = files(tmp_path / "task1_add.json", tmp_path / "task2_skip.json", form="superni")
    assert len(read(both)) == 4


@pytest.mark.parametrize("seed", [0, 3])
def test_instances_are_drawn_as_prompts_are_held_out(tmp_path, monkeypatch, seed):
    inputs = [f"{i} and {i}" for i in range(50)]
    instances = [{"input": asked, "output": ["x"]} for asked in inputs] + [{"input": "a"}]
    path = tmp_path / "a.json"
    monkeypatch.setattr(superni, "superni_prompt", lambda own, *_, **__: f"add: {own}")
    source = files(path, form="superni", max_per_task=8)

    def drawn(count):
        path.write_text(json.dumps({**TASK, "Instances": instances[:count]}))
        *found, rest = read_records("own", source, folder=None, seed=seed, config=CONFIG)
        assert (rest.reason, rest.records) == ("over max_per_task", count - 8)
        prompts = [f"add: {asked}" for asked in inputs[:count]]
        by_hand = sorted(prompts, key=lambda asked: slow_rank(asked, seed))[:8]
        assert {record.prompt for record in found} == set(by_hand)
        return set(by_hand)

    # As a task grows, those that stay are drawn again.
    before = drawn(40)
    assert drawn(50) & {f"add: {asked}" for asked in inputs[:40]} <= before
    path.write_text(json.dumps({**TASK, "Instances": instances}))
    assert "instance 50, output = None" in read(source, seed=seed)[0]


def slow_rank(asked, seed):
    key = hashlib.sha256(asked.encode()).digest()[:16]
    return hashlib.sha256(str(seed).encode() + key).hexdigest()


def test_the_manifest_counts_instances_that_were_never_written(tmp_path):
    for name, category in (("a", "Sums"), ("b", "Held out")):
        rows = [{"input": f"{name} {i}", "output": ["x"]} for i in range(40)]
        rows += [{"input": "nothing", "output": [""]}] * 2  # of 42 they are few, of 12 many
        task = {**TASK, "Categories": [category], "Instances": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(task))
    source = files(tmp_path / "*.json", form="superni", max_per_task=10)
    config = InstructionsConfig(sources={"own": source}, unseen=("Held out",))
    prepare_instructions(config, tmp_path / "out", seed=0)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["left_out"] == {"an empty answer": 4, "over max_per_task": 60}
    assert sum(file["instances"] for file in manifest["files"].values()) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Definition": []}, "a.json, Definition = []: must be text"),
        ({"Positive Examples": [{"input": "a"}]}, "a.json, Positive Examples = "),
        ({"Instances": {}}, "a.json, Instances = "),
        ({"Categories": [""]}, "a.json, Categories = ['']"),
        ({"Instances": [{"input": "a", "output": []}]}, "a.json, instance 0, output = []"),
        ({"Instances": [{"input": "a", "output": ["", " "]}]}, "a.json, instance 0, output"),
        ({"Instances": [{"input": "a", "output": ["b", 3]}]}, "a.json, instance 0, output"),
        ({"Instances": [{"output": ["b"]}]}, "a.json, instance 0, input = None"),
    ],
)
def test_faulty_task_files_are_named(tmp_path, change, message):
    (tmp_path / "a.json").write_text(json.dumps({**TASK, **change}))
    (found,) = read(files(tmp_path / "a.json", form="superni"))
    assert found.startswith(f"{tmp_path}/{message}")


def test_a_task_file_that_is_no_task_is_named(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "b.json").write_text("{")
    found = read(files(tmp_path / "a.json", tmp_path / "b.json", form="superni"))
    assert ["no task of" in found[0], "no JSON in UTF-8" in found[1]] == [True, True]


def rows_of(tmp_path):
    example = {"input": "1 and 2", "output": "3"}
    definitions = {"id": "add", "category": "Sums", "definition": "Add two numbers"}
    tasks = jsonl(tmp_path / "tasks.jsonl", {**definitions, "positive_examples": [example] * 3})
    own = {"task": "add", "category": "Sums", "split": "test"}
    rows = jsonl(
        tmp_path / "rows.jsonl",
        {"id": "1", "prompt": "4 and 1", "answer": "5", **own},
        {"id": "2", "prompt": "2 and 2", "answer": ["4", "four"], **own},
        {"id": "3", "prompt": "3 and 3", "answer": "6", "answers": ["6", "six"], **own},
        {"id": "4", "prompt": "3 and 4", "answer": "7", **own, "split": "train"},
    )
    return rows, tasks


def test_superni_rows_are_what_the_harness_asks(tmp_path):
    rows, tasks = rows_of(tmp_path)
    found = read(files(rows, form="superni-rows", definitions=tasks, split="test"))
    expected = superni_items(Path(rows), Path(tasks))
    assert found[0].prompt == PROMPT
    assert [[o.id, o.task, o.category, o.prompt, list(o.references)] for o in found] == [
        [item["id"], item["task"], item["category"], item["prompt"], item["answers"]]
        for item in expected
    ]
    assert len(read(files(rows, form="superni-rows", definitions=tasks))) == 4


@pytest.mark.parametrize("form", ["superni", "superni-rows"])
def test_as_many_examples_are_shown_as_asked(tmp_path, form):
    rows, tasks = rows_of(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(TASK))
    given = {"superni": [tmp_path / "a.json"], "superni-rows": [rows]}[form]
    more = {"definitions": tasks} if form == "superni-rows" else {}
    one = PROMPT.index(" Positive Example 2"), PROMPT.index("Now complete")
    none = PROMPT.index(" Positive Example 1"), PROMPT.index("Now complete")
    for shown, (start, stop) in {0: none, 1: one, 2: (0, 0)}.items():
        found = read(files(*given, form=form, examples=shown, **more))
        assert found[0].prompt == PROMPT[:start] + PROMPT[stop:], shown


def test_faulty_superni_rows_are_named(tmp_path):
    _, tasks = rows_of(tmp_path)
    rows = jsonl(
        tmp_path / "rows.jsonl",
        {"task": "sub", "prompt": "a", "answer": "b"},
        {"task": "add", "prompt": "a", "answer": ""},
    )
    form = "superni-rows"
    first, second = read(files(rows, form=form, definitions=tasks))
    assert first.startswith(f"{rows}, line 1, task = 'sub': {tasks} does not define it")
    assert second.startswith(f"{rows}, line 2, output = ")
    own = {"task": "add", "prompt": "a", "answer": "b"}
    rows = jsonl(
        tmp_path / "more.jsonl",
        *({**own, "category": wrong} for wrong in (1, ["a"], "\ud83d")),
        {**own, "task": ["add"]},
        {**own, "prompt": "\ud83d"},
        {**own, "answer": "\ud83d"},
    )
    fields = [said.split(", ", 1)[1] for said in read(files(rows, form=form, definitions=tasks))]
    assert [said.partition(" = ")[0] for said in fields] == [
        *(f"line {i}, category" for i in (1, 2, 3)),
        "line 4, task",
        "line 5, input",
        "line 6, output",
    ]
    labelled = jsonl(tmp_path / "a.jsonl", {**own, "domain": 3}, {**own, "domain": "d"})
    found = read(files(labelled, form=form, definitions=tasks, domain="c"))
    assert [record.domain for record in found] == ["c", "d"]
    broken = jsonl(tmp_path / "broken.jsonl", {"id": "add", "definition": " "})
    found = read(files(rows, form="superni-rows", definitions=broken))
    assert found[0].startswith(f"{broken}, line 1, definition = ' '")
    assert found[1].startswith(f"{broken}, line 1, positive_examples = None")


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"prompt": f"q{i}", "response": f"a{i}", "output": None} for i in range(30)]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    return folder


def test_a_dataset_is_streamed_in_seeded_order(dataset, tmp_path):
    source = InstructionSource(dataset="{folder}/data", max_records=20, category="c")
    found = read(source, folder=tmp_path, seed=1)
    assert len(found) == len({one.prompt for one in found}) == 20
    assert {(one.task, one.category) for one in found} == {("c", "c")}
    assert read(source, folder=tmp_path, seed=1) == found
    assert read(source, folder=tmp_path, seed=2) != found


def faults_of(source, folder=None):
    config = InstructionsConfig(sources={"own": source}, unseen=())
    return [str(fault) for fault in instruction_faults(config, folder=folder)]


def test_a_dataset_that_cannot_be_read_is_named(dataset, tmp_path):
    (missing,) = faults_of(InstructionSource(dataset=str(dataset), split="test"))
    assert missing.startswith("instructions.sources.own.dataset = ")
    assert "check name, subset, split" in missing
    (dataset / "train.parquet").unlink()
    datasets.Dataset.from_list([{"text": "a"}] * 2).to_parquet(dataset / "train.parquet")
    (other,) = faults_of(InstructionSource(dataset=str(dataset)))
    assert ", row 0, prompt = ['text']: the record has none of" in other
    (dataset / "train.parquet").unlink()
    columns = {"prompt": [], "response": []}
    datasets.Dataset.from_dict(columns).to_parquet(dataset / "train.parquet")
    (empty,) = faults_of(InstructionSource(dataset=str(dataset)))
    assert "it holds no rows" in empty


def test_missing_files_and_folders_are_named_together(tmp_path):
    source = InstructionSource(
        files=(f"{tmp_path}/none.jsonl", f"{tmp_path}/*.jsonl", "{folder}/a.jsonl"),
        form="superni-rows",
        definitions=f"{tmp_path}/tasks.jsonl",
    )
    found = faults_of(source)
    assert len(found) == 4
    assert "there is no such file" in found[0]
    assert "give the folder parameter" in found[2]
    assert found[3].startswith("instructions.sources.own.definitions = ")
    (empty,) = faults_of(files(jsonl(tmp_path / "a.jsonl")))
    assert "it holds none" in empty
