"""What reads and follows pages finds what is wrong with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docs.pages import blocks
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

<!-- test: exit 3 -->
```sh
exit 3
```

```{doctest}
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
        ("```sh\necho $UNSET\n```", "exit status 1, not 0"),
        ("<!-- test: exit 1 -->\n```sh\ntrue\n```", r"page\.md:2: exit status 0, not 1"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```", r"page\.md:5: .*"),
        ("```console\n$ echo 1\n2\n```", "the page says:\n2\n\nit says:\n1\n"),
        ("```{doctest}\n>>> 1\n2\n```", "Expected:\n    2\nGot:\n    1"),
        ("```sh\necho 1\n```\n\nBut:\n\n```text\n1\n```", "nothing's output"),
        ("```\nplain\n```", "nothing runs a block of 'no language'"),
        ("```json\n{\n```", "this is no json"),
        ("```sh\n.venv/bin/pip install x\n```", "a test does not change the machine"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, told: str, follow: Follow) -> None:
    with pytest.raises(AssertionError, match=told):
        follow(text)
