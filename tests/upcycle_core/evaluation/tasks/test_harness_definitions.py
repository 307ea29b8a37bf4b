"""Tasks made whole on disk: nothing outside their directory counts afterwards."""

import shutil
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.upcycle_core.evaluation.tasks.made import (
    ROWS,
    WRITING,
    documents,
    load,
    local,
    save_rows,
    save_task,
    save_yaml,
    write,
)
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.config import EvaluationTask, SuperNI
from upcycle_core.evaluation.tasks.definitions import runs_programs, task_faults, task_files
from upcycle_core.evaluation.tasks.heldout import heldout_items
from upcycle_core.evaluation.tasks.superni import superni_items

TEXTS = [
    " ".join(f"{word}{i % 7} and" for i in range(300))
    for word in ("river", "meadow", "letter", "kitchen", "engine", "harbour")
]
DEFINED = {"id": "add", "category": "Sums", "definition": "Add.", "positive_examples": []}
ASKED = [
    {"id": f"add-{i}", "task": "add", "category": "Sums", "split": "test", "prompt": f"{i}+1"}
    | {"answer": str(i + 1)}
    for i in range(3)
]


@pytest.fixture
def source(tmp_path) -> Path:
    """A definition in parts: what it includes and calls, and its data, lie around it."""
    other = {**WRITING, **local("{folder}/data/other.jsonl")}
    base = save_yaml(tmp_path / "source" / "common" / "base.yaml", other)
    (base.parent / "marks.py").write_text("def mark(text):\n    return text.strip()\n")
    base.write_text(base.read_text() + "description: !function 'marks.mark'\n")
    folder = tmp_path / "source" / "own"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "utils.py").write_text(
        "def shouted(rows):\n"
        "    return rows.map(lambda row: {'prompt': row['prompt'].replace('+', ' PLUS ')})\n"
    )
    (folder / "parts" / "unused.py").write_text("")
    (folder / "notes.txt").write_text("unused")
    save_rows(tmp_path / "source" / "data" / "a.jsonl", ROWS[:2])
    save_rows(tmp_path / "source" / "data" / "b.jsonl", ROWS[2:])
    save_rows(tmp_path / "source" / "data" / "shown.jsonl", ROWS[:1])
    data = local("{folder}/data/a.jsonl", "{folder}/data/b.jsonl")
    data["dataset_kwargs"]["data_files"]["shown"] = "{folder}/data/shown.jsonl"
    task = save_yaml(folder / "task.yaml", {"include": "../common/base.yaml", **data})
    with task.open("a") as file:
        file.write("fewshot_split: shown\ndescription: ''\n")
        file.write("process_docs: !function parts.utils.shouted\n")
    return tmp_path / "source"


def definition(folder: Path, text: str) -> dict[str, str]:
    (folder / "task.yaml").write_text(text)
    return {"definition": str(folder / "task.yaml")}


def superni(folder: Path, *, line: str = "", **options) -> dict[str, SuperNI]:
    save_rows(folder / "instances.jsonl", ASKED)
    save_rows(folder / "tasks.jsonl", [DEFINED])
    if line:
        (folder / "instances.jsonl").write_text(line)
    files = {"instances": "{folder}/instances.jsonl", "tasks": "{folder}/tasks.jsonl"}
    return {"superni": SuperNI(**{**files, **options})}


FAULTS = {
    "no definition": (
        lambda at: {"definition": "gone.yaml"},
        r"tasks.t.definition = '.*gone.yaml': no such file; name a task's YAML",
    ),
    "a directory": (
        lambda at: {"definition": str(at)},
        r"tasks.t.definition = .*: cannot be read \(.*directory",
    ),
    "bad YAML": (
        lambda at: definition(at, "task: [1\n"),
        r"tasks.t.definition = '.*task.yaml': not YAML \(.*line 2",
    ),
    "a group": (
        lambda at: definition(at, "group: mmlu\ntask: [a, b]\n"),
        r"tasks.t.definition = '.*task.yaml': no task definition; see recipes/tasks",
    ),
    "a list": (
        lambda at: definition(at, "- a\n"),
        r"tasks.t.definition = '.*task.yaml': no task definition",
    ),
    "an include that is not there": (
        lambda at: definition(at, "include: base.yaml\n"),
        r"tasks.t.definition = '.*base.yaml': no such file",
    ),
    "an include of itself": (
        lambda at: definition(at, "include: [task.yaml]\n"),
        r"tasks.t.definition = '.*task.yaml': includes itself",
    ),
    "an include by its place here": (
        lambda at: definition(at, f"include: {at}/base.yaml\n"),
        r"tasks.t.definition = '.*base.yaml': .*write it relative to .*task.yaml",
    ),
    "data that are not there": (
        lambda at: {"definition": save_yaml(at / "task.yaml", local("/gone.jsonl")).as_posix()},
        r"tasks.t.definition = '/gone.jsonl': no such file; put the data there$",
    ),
    "data that are not in the folder": (
        lambda at: {"definition": save_yaml(at / "t.yaml", local("{folder}/gone")).as_posix()},
        r"tasks.t.definition = '.*/gone': no such file; put the data there, or set "
        r"task_evaluation.folder, now /.*, to the folder that holds it",
    ),
    "a directory of data": (
        lambda at: definition(at, "dataset_path: '{folder}/parts'\n"),
        r"tasks.t.definition.dataset_path = '{folder}/parts': name every file: dataset_path one of",
    ),
    "no data files": (
        lambda at: definition(at, "dataset_path: json\n"),
        r"tasks.t.definition.dataset_kwargs.data_files = None: name every file",
    ),
    "data files that are none": (
        lambda at: definition(at, "dataset_path: csv\ndataset_kwargs: {data_files: {test: [1]}}\n"),
        r"tasks.t.definition.dataset_kwargs.data_files = {'test': \[1\]}: name every file",
    ),
    "no instances": (
        lambda at: superni(at, instances="{folder}/gone.jsonl"),
        r"tasks.t.superni.instances = '.*gone.jsonl': no such file",
    ),
    "a category that is not there": (
        lambda at: superni(at, categories=("Sums", "Names")),
        r"tasks.t.superni.categories = 'Names': .* it has Sums",
    ),
    "a split that is not there": (
        lambda at: superni(at, split="train"),
        r"tasks.t.superni.split = 'train': .* it has test",
    ),
    "a bad line": (
        lambda at: superni(at, line='{"id": [1]}\n'),
        r"tasks.t.superni: .*instances.jsonl, line 1: id = \[1\]: give a string",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_keeps_a_task_from_being_made(case, tmp_path):
    make, message = FAULTS[case]
    task = EvaluationTask(**make(tmp_path))
    faults = task_faults(task, "tasks.t", folder=tmp_path, root=Path("/"))
    with pytest.raises(InputError, match=f"^{message}"):
        raise InputError(*faults[:1])


@pytest.mark.parametrize("kind", ["definition", "superni"])
def test_a_folder_that_nobody_named_is_one_fault_a_field(kind, source, tmp_path):
    tasks = {
        "definition": {"definition": str(source / "own" / "task.yaml")},
        "superni": superni(tmp_path),
    }
    faults = task_faults(EvaluationTask(**tasks[kind]), "tasks.t", folder=None, root=Path("/"))
    fields = {"definition": ["definition"], "superni": ["superni.instances", "superni.tasks"]}
    assert [(fault.field, fault.value) for fault in faults] == [
        ("task_evaluation.folder", None) for _ in fields[kind]
    ]
    for fault, field in zip(faults, fields[kind], strict=True):
        assert fault.remedy == (f"tasks.t.{field} needs it; add --set task_evaluation.folder=PATH")


def moved(folder: Path, out: Path) -> Path:
    """``out`` elsewhere, and all that it was made from gone."""
    shutil.rmtree(folder)
    (out.parent / "elsewhere").mkdir()
    return Path(shutil.move(out, out.parent / "elsewhere" / out.name))


def test_a_definition_needs_nothing_that_it_came_from(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as it is where nobody has set it
    task = {"definition": str(source / "own" / "task.yaml")}
    assert not task_faults(EvaluationTask(**task), "tasks.t", folder=source, root=Path("/"))
    out = moved(source, write(tmp_path / "sums", folder=source, shots=1, **task))
    loaded = load(out)
    asked = [{**row, "prompt": row["prompt"].replace("+", " PLUS ")} for row in ROWS]
    assert documents(loaded) == asked
    (part,) = loaded.tasks.values()
    assert part.sampler.df == asked[:1]
    assert part.get_config("generation_kwargs")["max_gen_toks"] == 6  # of what is included
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "task.json",
        "data/shown-0.jsonl",
        "data/test-0.jsonl",
        "data/test-1.jsonl",
        "definition/own/parts/utils.py",
        "definition/own/task.yaml",
        "definition/common/base.yaml",
        "definition/common/marks.py",
    }


def test_files_of_parquet_are_read_as_such(tmp_path):
    data = tmp_path / "source" / "rows.parquet"
    data.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), data)
    keys = {**local(data), **WRITING, "dataset_path": "parquet"}
    path = save_yaml(tmp_path / "source" / "task.yaml", keys)
    out = write(tmp_path / "sums", definition=str(path))
    assert (out / "data" / "test-0.parquet").is_file()
    assert documents(load(moved(data.parent, out))) == ROWS


@pytest.mark.parametrize("kind", ["continuation", "last_word", "text"])
def test_items_of_held_out_text_are_kept(kind, tmp_path):
    out = write(tmp_path / "passages", texts=TEXTS, heldout=kind, items=3)
    assert documents(load(out)) == heldout_items(TEXTS, kind=kind, count=3, seed=0)


def test_super_natural_instructions_are_kept(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    task = superni(folder, per_task=2)
    expected = superni_items(folder / "instances.jsonl", folder / "tasks.jsonl", per_task=2)
    out = moved(folder, write(tmp_path / "superni", folder=folder, **task))
    loaded = load(out)
    assert documents(loaded) == expected
    assert len(expected) == 2
    assert loaded.extra == {"rouge_l": "answers", "category": "category"}


def test_the_files_of_a_task_are_those_whose_change_changes_it(source, tmp_path):
    """Changes every file in turn; what is written differs for the listed ones alone."""
    task = EvaluationTask(definition=str(source / "own" / "task.yaml"))
    listed = task_files(task, folder=source, root=Path("/"))
    before = tree_digest(write(tmp_path / "0", folder=source, definition=task.definition))
    again = tree_digest(write(tmp_path / "again", folder=source, definition=task.definition))
    assert again == before
    changing = set()
    for number, file in enumerate(sorted(path for path in source.rglob("*") if path.is_file()), 1):
        text = file.read_text()
        file.write_text(text + "\n")
        out = write(tmp_path / str(number), folder=source, definition=task.definition)
        if tree_digest(out) != before:
            changing.add(file)
        file.write_text(text)
    assert set(listed.values()) == changing
    assert set(listed) == {
        "{folder}/data/a.jsonl",
        "{folder}/data/b.jsonl",
        "{folder}/data/shown.jsonl",
        "own/parts/utils.py",
        "own/task.yaml",
        "common/base.yaml",
        "common/marks.py",
    }


def test_modules_of_one_name_are_all_listed(source):
    shutil.copy(source / "own" / "parts" / "utils.py", source / "own" / "utils.py")
    path = source / "own" / "task.yaml"
    path.write_text(path.read_text() + "doc_to_text: !function utils.shouted\n")
    listed = task_files(EvaluationTask(definition=str(path)), folder=source, root=Path("/"))
    assert {"own/utils.py", "own/parts/utils.py"} <= set(listed)


def test_other_tasks_list_what_is_outside(tmp_path):
    for task in ({"harness": "gsm8k"}, {"heldout": "text", "domain": "law"}):
        assert task_files(EvaluationTask(**task), folder=None, root=Path("/")) == {}
    listed = task_files(EvaluationTask(**superni(tmp_path)), folder=tmp_path, root=Path("/"))
    assert listed == {
        "{folder}/instances.jsonl": tmp_path / "instances.jsonl",
        "{folder}/tasks.jsonl": tmp_path / "tasks.jsonl",
    }


def test_a_program_that_is_included_is_known_to_run(tmp_path):
    path = Path(save_task(tmp_path, program="{{response}}"))
    over = save_yaml(path.with_name("over.yaml"), {"include": "task.yaml"})
    assert runs_programs(EvaluationTask(definition=over.name), over.parent)
    assert not runs_programs(EvaluationTask(harness="gsm8k"), tmp_path)


def test_text_that_gives_too_few_items_is_said_with_the_task(tmp_path):
    with pytest.raises(InputError, match=r"^tasks.passages.items = 900: .* ask for fewer"):
        write(tmp_path / "passages", texts=TEXTS, heldout="text", items=900)
