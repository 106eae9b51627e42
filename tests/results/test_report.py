"""The report: contract files, determinism, hostile text, several runs, and what is refused."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from results import Answer, Cell, Divergence, ResultsError, Store, leaderboard, write_report
from results.figures import alpha_figure, scale_text

HOSTILE = '<script>alert("x")</script> | `$x$` \\ 😀 & [a](b)'
MODELS = [
    ("base", "base"),
    ("math", "expert"),
    ("ta", "merge"),
    (HOSTILE, "merge"),
    ("logit", "composition"),
]
EXPERIMENT = f"name: {HOSTILE!r}\nseed: 3\nprovenance: {{versions: {{torch: 2.13.0}}}}\n"
FILES = [
    "leaderboard.csv",
    "metrics.csv",
    "comparisons.csv",
    "equivalence.csv",
    "leaderboard.md",
    "figures/scores.svg",
    "figures/differences.svg",
    "figures/alpha.svg",
    "report.html",
]


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fill(folder: Path, answered: int = 8, protocol: str = "p", experiment: str = "") -> Path:
    """A run of five models on two benchmarks of eight items, the last of which is not answered
    by `logit` beyond `answered`; and two merges' divergences at three alphas."""
    cells, answers = [], []
    for number, (model, kind) in enumerate(MODELS):
        for benchmark, binary in (("gsm8k", True), ("nats", False)):
            items = tuple((str(i), digest(model, benchmark, i)) for i in range(8))
            cells.append(
                Cell(model, kind, "m", benchmark, "score", binary, binary, protocol, items)  # type: ignore[arg-type]
            )
            for place, (item, key) in enumerate(items):
                if model == "logit" and place >= answered:
                    continue
                score = float((place + number) % 3 == 0) if binary else 1 + (place * number) % 5 / 7
                completion = HOSTILE + "\ud800\n\0"
                metrics = {"score": score, "strict": 0.0}
                answers.append(
                    Answer(
                        key, benchmark, item, digest(item), completion, score, metrics,
                        place == 0, 9, 20, 0.25, "float32", 4,
                    )
                )  # fmt: skip
    rows = [
        Divergence(
            digest(model, alpha, i), model, "product(1, 1)", "gsm8k", alpha, str(i), 10,
            (10 + i) * alpha**4, (1 + i) * alpha**4, alpha**4 / 4, alpha**2, 10 - alpha,
        )
        for model in ("ta", HOSTILE)
        for alpha in (1 / 256, 1 / 16, 1.0)
        for i in range(6)
    ]  # fmt: skip
    with Store(folder / "records.sqlite") as store:
        store.set_plan(cells)
        store.add(answers)
        store.add_divergences(rows)
    if experiment:
        (folder / "experiment.yaml").write_text(experiment, encoding="utf-8")
    return folder


class Page(HTMLParser):
    """Collects tags, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attributes if name.split(":")[-1] in ("href", "src")
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report."""
    folder = fill(tmp_path_factory.mktemp("run"), experiment=EXPERIMENT)
    assert [str(path.relative_to(folder)) for path in write_report(folder)] == FILES
    return folder


def test_the_leaderboard_is_read_back_exactly(run: Path) -> None:
    with Store(run / "records.sqlite", read_only=True) as store:
        board = leaderboard(store.frame(), store.cells())
    again = pd.read_csv(run / "leaderboard.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(again, board, check_dtype=False, check_exact=True)
    assert b"\r" not in (run / "leaderboard.csv").read_bytes()
    assert not list(run.glob(".*"))


def test_the_same_records_give_the_same_bytes(run: Path, tmp_path: Path) -> None:
    for again in write_report(run, out=tmp_path):
        assert again.read_bytes() == (run / again.relative_to(tmp_path)).read_bytes(), again


def test_the_page_stands_alone_and_holds_no_foreign_markup(run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert "svg" in page.tags
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"https?://", text)
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)


def test_figures_are_well_formed_and_carry_hostile_names(run: Path) -> None:
    for path in (run / "figures").glob("*.svg"):
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert not [element for element in root.iter() if element.tag.endswith("script")]
        assert "alert" in "".join(root.itertext())


def test_exact_equivalence_leaves_an_empty_panel_not_a_crash(run: Path) -> None:
    """KL 0 has no place on a logarithmic axis; the gap beside it is still drawn."""
    table = pd.read_csv(run / "equivalence.csv")
    table.loc[table["metric"] == "kl", "value"] = 0.0
    assert "ta against product" in str(alpha_figure(table))
    table["value"] = 0.0
    assert alpha_figure(table) is None


def test_scales_are_written_as_fractions() -> None:
    scales = (1 / 256, 0.0039, 1 / 3, 0.5, 0.3, 0.999, 1.0, 2.0)
    expected = ["1/256", "1/256", "1/3", "1/2", "0.3", "0.999", "1", "2"]
    assert [scale_text(scale) for scale in scales] == expected


def test_markdown_escapes_pipes_and_markup(run: Path) -> None:
    lines = (run / "leaderboard.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(MODELS)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5}
    assert not [line for line in table if "<script" in line.replace("\\<", "")]


def test_unfinished_cells_are_marked_and_never_best(tmp_path: Path) -> None:
    write_report(fill(tmp_path, answered=3))
    markdown = (tmp_path / "leaderboard.md").read_text(encoding="utf-8")
    logit = next(line for line in markdown.splitlines() if line.startswith("| logit"))
    assert logit.count("(3 of 8)") == 2
    assert "**" not in logit
    assert "10 of 80 answers are missing" in markdown
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "10 of 80 planned answers are missing" in page
    assert "3 of 8" in page


def test_an_empty_store_and_an_empty_plan_still_have_a_report(tmp_path: Path) -> None:
    Store(tmp_path / "records.sqlite").close()
    written = write_report(tmp_path)
    assert [path.name for path in written if path.suffix == ".svg"] == []
    assert (tmp_path / "leaderboard.csv").read_text().count("\n") == 1
    assert "No benchmark was planned" in (tmp_path / "report.html").read_text()


def test_a_figure_of_an_earlier_report_does_not_stay(tmp_path: Path) -> None:
    write_report(fill(tmp_path))
    (tmp_path / "figures" / "mine.svg").touch()
    with Store(tmp_path / "records.sqlite") as store:
        store.select_divergences([])
    write_report(tmp_path)
    left = {path.name for path in (tmp_path / "figures").iterdir()}
    assert left == {"scores.svg", "differences.svg", "mine.svg"}


def test_several_runs_stand_in_one_table_with_a_column_run(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "one"), fill(tmp_path / "two", answered=3)
    write_report(one, two, out=tmp_path / "both")
    table = pd.read_csv(tmp_path / "both" / "leaderboard.csv")
    assert table.columns[0] == "run"
    assert table["run"].tolist() == ["one"] * 10 + ["two"] * 10
    assert "two · ta" in (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "one" / "report.html").exists()


def test_runs_under_different_protocols_are_refused(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "one"), fill(tmp_path / "two", protocol="q")
    with pytest.raises(ResultsError, match="'gsm8k' was run under more than one protocol"):
        write_report(one, two, out=tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_what_cannot_be_reported_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no such file"):
        write_report(tmp_path)
    with pytest.raises(ResultsError, match="no folder of results"):
        write_report()
    with pytest.raises(ResultsError, match="name one with --out"):
        write_report(run, tmp_path)
    with pytest.raises(ResultsError, match="named twice"):
        write_report(run, run, out=tmp_path / "both")
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="cannot be written"):
        write_report(run, out=tmp_path / "file")
    broken = fill(tmp_path / "broken", experiment="a: [")
    with pytest.raises(ResultsError, match=r"experiment\.yaml is not valid YAML"):
        write_report(broken)
    (broken / "experiment.yaml").write_bytes(b"\xff")
    with pytest.raises(ResultsError, match=r"experiment\.yaml cannot be read"):
        write_report(broken)


def test_the_page_says_how_it_was_run_and_answers_the_question(run: Path) -> None:
    """Two merges against one composition on two benchmarks make four pairs; KL is c·α^4."""
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "Of 4 paired comparisons of a merge with a composition" in text
    assert "<td>versions.torch</td><td>2.13.0</td>" in text
    assert "float32, batch size 4" in text
    assert "the KL grows as α to the power 4.00" in text
