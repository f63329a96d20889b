from pathlib import Path

import pytest
from supervised_rig import Plants


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None: ...


@pytest.fixture
def plants(tmp_path: Path) -> Plants:
    return Plants(tmp_path)
