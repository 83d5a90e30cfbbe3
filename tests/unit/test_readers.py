"""Readers of oddly shaped records."""

import pytest

from draftpool.data.readers import READERS, get_reader, reader
from draftpool.errors import DraftpoolError


def chat(*contents, ideal="x"):
    """Return a chat record."""
    return {"input": [{"role": "user", "content": content} for content in contents], "ideal": ideal}


def only(name, record):
    """Return the one row a reader yields."""
    (row,) = get_reader(name, "here")(record)
    return row


def test_unknown_and_double_names():
    with pytest.raises(DraftpoolError, match="sources.*unknown reader 'nope'.*last_message"):
        get_reader("nope", "domains.x.sources[0].reader")
    with pytest.raises(DraftpoolError, match="registered twice"):
        reader("last_message")(lambda record: [])
    assert get_reader("last_message", "") is READERS["last_message"]


def test_last_message_leaves_instructions_out():
    row = only("last_message", chat("You are a bot", " 1 + 1?\n", ideal=["2"]))
    assert row["question"] == "1 + 1?" and row["ideal"] == ["2"]


def test_first_turn():
    row = only("first_turn", {"turns": ["one", "two"], "category": "stem", "reference": ["r1", "r2"]})
    assert (row["question"], row["answer"], row["category"]) == ("one", "r1", "stem")
    assert only("first_turn", {"turns": ["one"]})["answer"] is None


def test_question_context():
    row = only(
        "question_context",
        chat("system", "Question: Who\n wrote it?\n Context: Ann[citation needed] wrote: Context: it."),
    )
    assert row["question"] == "Who wrote it?" and row["context"] == "Ann wrote: Context: it."


def test_claims():
    row = only(
        "claims", chat("system", "claim: A  is b.\nclaim: C is d.\nquestion: is it?", ideal="Summary: Yes.")
    )
    assert row["claims"] == "- A is b.\n- C is d." and row["each_claim"] == ["A is b.", "C is d."]
    assert row["question"] == "is it?" and row["summary"] == "Yes."


def test_passage_drops_footnote_marks_only():
    row = only(
        "passage", {"0": "It was[a] born[note 1] in [sic] \n 1900.[clarification needed]\n", "1": "shuffled"}
    )
    assert row == {"passage": "It was born in [sic] 1900."}


def test_task_prompt_drops_the_cut_off_list_number():
    assert only("task_prompt", {"task_prompt": "What books?\n\n              1"})["question"] == "What books?"
    assert only("task_prompt", {"task_prompt": "Add 12 + 4 "})["question"] == "Add 12 + 4"


def test_conversations_yield_one_row_each():
    document = {"categories": ["trivia", "x"], "conversations": [["Which year?", 1963], ["alone"]]}
    rows = list(get_reader("conversations", "")(document))
    assert rows == [
        {"question": "Which year?", "answer": "1963", "category": "trivia"},
        {"question": "alone", "answer": None, "category": "trivia"},
    ]


SPIDER = chat(
    "Answer the following question.\nTable: Singer. Columns: Id (number), Name (text)\n"
    "Table: concert. Columns: Id (number)\n\nQuestion: How many  singers?\n",
    ideal="SELECT  count(*) FROM singer",
)
COSQL = chat(
    "TASK: Answer.\nTable concert, columns = [*,id,name]\nTable singer, columns = [*,id]\nKeys = [a = c]\n",
    "Q: Which?",
    "A: SELECT id FROM concert",
    "Q: How many?",
    ideal=["A: SELECT 1"],
)


def test_spider_and_cosql_share_schema_form_and_database():
    spider, cosql = only("spider", SPIDER), only("cosql", COSQL)
    assert spider["schema"] == "Singer(Id, Name)\nconcert(Id)"
    assert cosql["schema"] == "concert(id, name)\nsinger(id)"
    assert spider["database"] == cosql["database"] == "concert singer"
    assert (spider["question"], spider["query"], spider["history"]) == (
        "How many singers?",
        "SELECT count(*) FROM singer",
        "",
    )
    assert cosql["question"] == "How many?" and cosql["query"] == "SELECT 1"
    assert cosql["history"] == "Earlier:\nQ: Which?\nA: SELECT id FROM concert\n\n"
