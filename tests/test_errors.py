"""Codes and exit statuses are an interface."""

from allranks import errors


def leaves():
    return [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.AllranksError)]


def test_codes_and_statuses_are_distinct_and_collide_with_nothing():
    assert len({cls.code for cls in leaves()}) == len({cls.status for cls in leaves()}) == len(leaves())
    assert all(64 <= cls.status < 100 for cls in leaves())


def test_the_readme_lists_every_status():
    from conftest import ROOT

    readme = (ROOT / "README.md").read_text()
    for cls in errors.CATALOGUE:
        assert f"| {cls.status} | `{cls.code}` | {cls.__doc__} |" in readme
        assert cls.__doc__ and cls.todo and "\n" not in cls.__doc__ + cls.todo
