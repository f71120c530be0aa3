"""Commands of `trt-kvcache` in this process."""

from typer.testing import CliRunner, Result

from trt_kvcache.cli.app import app


def invoke(*words: object, code: int | None = 0) -> Result:
    """Run a command, which ends with this exit code; None: with any."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert code in (result.exit_code, None), result.output
    return result
