"""What reads and follows pages finds what is wrong with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docs.pages import PageError, blocks, spans
from docs.reader import Reader

from docs import recipes

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="the pages are for a POSIX shell"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing"),
]

Follow = Callable[..., Path]


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Follow]:
    """Follow a page of this text; return the reader's folder."""
    readers = []

    def follow(text: str, *, lenient: bool = False) -> Path:
        page = tmp_path / "page.md"
        page.write_text(text, encoding="utf-8")
        reader = Reader(tmp_path / f"reader{len(readers)}", lenient=lenient)
        readers.append(reader)
        for block in blocks(page):
            recipes.follow(reader, block)
        return reader.folder

    yield follow
    for reader in readers:
        reader.close()


RIGHT = """
<!-- file: say.py -->
```python
import sys
print("one two", *sys.argv[1:])
```

```sh
export WORD=three
OURS='one
two'
mkdir below
cd below
```

Text, and `code that
wraps`.

```console
$ python ../say.py $WORD
one   two three
$ echo "$OURS" && python -c 'import os; print(os.environ.get("OURS"))'
one two None
$ printf '%s\\n' a b c; echo d >&2
a
...
d
$ cat << END
> four
> END
four
```

1. A list:

   ```python
   from pathlib import Path
   print(Path.cwd().name, 1 / 3)
   ```

   ```text
   below 0.33...
   ```

<!-- test: exit 3 -->
```sh
exit 3
```

:::{note}
```{doctest}
>>> import os
>>> seven = 7
```
:::

```{doctest}
>>> seven
7
>>> print("a long line")
a ... line
```

```json
{"valid": true}
```
"""


def test_a_page_that_is_right_is_followed_to_its_end(follow: Follow) -> None:
    folder = follow(RIGHT)
    assert (folder / "below").is_dir()
    assert not (folder.parent / "home" / ".cache").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```sh\nfalse\n```", r"page\.md:1: exit status 1, not 0"),
        ("```sh\nfalse | true\n```", "exit status 1, not 0"),
        ("```sh\necho $UNSET\n```", "exit status 1, not 0"),
        ("<!-- test: exit 1 -->\n```sh\ntrue\n```", r"page\.md:2: exit status 0, not 1"),
        ("```python\n1 / 0\n```", "ZeroDivisionError"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```", r"page\.md:5: .*"),
        ("```console\n$ echo 1\n2\n```", "the page says:\n2\n\nit says:\n1\n"),
        ("```console\n$ false\n$ true\n```", "exit status 1"),
        ("```console\necho\n```", "begins with a command"),
        ("```{doctest}\n>>> 1\n2\n```", "Expected:\n    2\nGot:\n    1"),
        ("```{doctest}\n1\n```", "without a single example"),
        ("```text\n1\n```", "nothing's output"),
        ("```sh\necho 1\n```\n\nBut:\n\n```text\n1\n```", "nothing's output"),
        ("```\nplain\n```", "nothing runs a block of 'no language'"),
        ("```cuda\n__global__\n```", "nothing runs a block of 'cuda'"),
        ("```json\n{\n```", "this is no json"),
        ("```toml\n=\n```", "this is no toml"),
        ("```yaml\na: [\n```", "this is no yaml"),
        ("```ini\nx\n```", "this is no ini"),
        ("```sh\npip install x\n```", "a test does not change the machine"),
        ("```sh\n.venv/bin/pip install x\n```", "a test does not change the machine"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, told: str, follow: Follow) -> None:
    with pytest.raises(AssertionError, match=told):
        follow(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```sh\ntrue\n", r"page\.md:1: the block does not end"),
        ("<!-- test: someday -->\n```sh\ntrue\n```", "'someday' is no mark"),
        ("<!-- test: slow -->\n\nText.\n\n```sh\ntrue\n```", r"page\.md:3: the mark before"),
        ("<!-- file: a -->", "belongs to no block"),
        ("```{unheard-of}\n```", "no test knows the directive unheard-of"),
    ],
)
def test_what_can_not_be_read_is_told_with_its_place(text: str, told: str, follow: Follow) -> None:
    with pytest.raises(PageError, match=told):
        follow(text)


def test_nothing_is_set_up_unseen(follow: Follow) -> None:
    with pytest.raises(AssertionError):
        follow("<!-- setup: echo 1 > a -->\n```console\n$ cat a\n1\n```")


def test_no_setting_of_the_caller_reaches_the_reader(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_DIR", "/nowhere")
    follow("```console\n$ env | grep -c ^KCACHE_ || true\n0\n```")


def test_kcache_is_the_one_that_is_tested(follow: Follow) -> None:
    pytest.importorskip("click", reason="the extra cli is not installed")
    import kcache

    follow(
        f"```console\n$ kcache --version\nkcache {kcache.__version__}\n"
        f"$ .venv/bin/kcache --version\nkcache {kcache.__version__}\n```"
    )


def test_an_image_is_made_in_a_folder(follow: Follow) -> None:
    folder = follow(
        """<!-- file: app/main.py -->
```python
print("hello")
```

<!-- test: dockerfile -->
```dockerfile
# syntax=docker/dockerfile:1
FROM python:3.12-slim AS build
ENV PLACE=/opt/there KIND="a b"
RUN --mount=type=cache,target=/root/.cache/pip \\
    pip install nothing && useradd somebody
WORKDIR /work
COPY app/ /app
COPY . .
RUN mkdir -p "$PLACE" && python /app/main.py > /opt/there/said \\
    && echo "$KIND" >> $PLACE/said
FROM python:3.12-slim
COPY --from=build /opt/there /opt/there
USER somebody
CMD ["python", "/app/main.py"]
```
""",
        lenient=True,
    )
    image = folder.with_name("image")
    assert (image / "opt" / "there" / "said").read_text() == "hello\na b\n"
    assert (image / "work" / "app" / "main.py").is_file()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("FROM scratch\nRUN false", "exit status 1"),
        ("FROM scratch", "nothing in it is run"),
        ("RUNE x", "no test knows RUNE"),
        ("COPY missing /app", "there is no missing"),
    ],
)
def test_an_image_that_can_not_be_made_is_told(text: str, told: str, follow: Follow) -> None:
    with pytest.raises(AssertionError, match=told):
        follow(f"<!-- test: dockerfile -->\n```dockerfile\n{text}\n```", lenient=True)


WORKFLOW = """<!-- test: workflow -->
```yaml
on: push
env:
  PLACE: ${{ github.workspace }}/here
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - run: pip install something
      - name: A step
        env: {WORD: one}
        run: |
          mkdir -p "$PLACE"
          echo $WORD > "$PLACE/said"
      - run: COMMAND
```
"""


def test_a_workflow_runs_its_steps(follow: Follow) -> None:
    folder = follow(WORKFLOW.replace("COMMAND", 'test -z "${WORD:-}"'), lenient=True)
    assert (folder / "here" / "said").read_text() == "one\n"


def test_a_pipeline_runs_its_scripts(follow: Follow) -> None:
    text = "variables: {A: b}\ntest:\n  script:\n    - echo $A > said\n    - pip install x"
    folder = follow(f"<!-- test: workflow -->\n```yaml\n{text}\n```", lenient=True)
    assert (folder / "said").read_text() == "b\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [("exit 7", "exit status 7"), ("echo ${{ secrets.x }}", "no test knows the expression")],
)
def test_a_step_that_fails_is_told(command: str, told: str, follow: Follow) -> None:
    with pytest.raises(AssertionError, match=told):
        follow(WORKFLOW.replace("COMMAND", command), lenient=True)


def test_code_in_the_text_is_found_across_lines_and_not_in_blocks() -> None:
    text = "A `one` and `two\nmore`.\n\n```sh\n`three`\n```\n\n- ``four ` five``\n"
    assert list(spans(text)) == [(1, "one"), (1, "two more"), (8, "four ` five")]
