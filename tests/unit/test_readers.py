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
    assert row["wording"] == "# + #?"


def test_wording_is_shared_by_questions_that_differ_in_numbers_only():
    a, b, c = (
        only("last_message", chat(text))["wording"]
        for text in ("Pay $1,020.50 at 7%.", "Pay $9 at 10%.", "Pay $9 in 10 years.")
    )
    assert a == b == "Pay $# at #%." != c


def test_multiple_choice_by_line_with_a_subject():
    row = only(
        "multiple_choice",
        chat(
            "system",
            "Subject: Skin\n\nWhich  one? a) no\n\na) C. tetani\nb) Both 1)\nc) x",
            ideal="b) Both 1)",
        ),
    )
    assert row == {
        "question": "Which one? a) no",
        "options": "A. C. tetani\nB. Both 1)\nC. x",
        "answer": "Both 1)",
        "letter": "B",
        "subject": "Skin",
        "wording": "Which one? a) no",
    }


def test_multiple_choice_in_line_in_any_order_without_the_instruction():
    row = only(
        "multiple_choice",
        chat(
            "What is due on $50,000? B. 6,383 A. The U.S. rate. Respond with only the letter: A. or B.",
            ideal="A",
        ),
    )
    assert row["question"] == "What is due on $50,000?" and row["wording"] == "What is due on $#?"
    assert row["options"] == "B. 6,383\nA. The U.S. rate." and row["answer"] == "The U.S. rate."
    assert row["letter"] == "A" and row["subject"] is None


def test_multiple_choice_without_options_yields_nothing():
    text = "Order these steps: 1 = count, 2 = choose. For each question you must select 'A' or 'B'."
    assert list(get_reader("multiple_choice", "")(chat(text, ideal="A"))) == []


def test_abstract_is_one_line():
    row = only("abstract", chat("system", " Title.\n\nWe  tried\xa0it.\n-----\n It worked -- mostly.\n"))
    assert row["abstract"] == "Title. We tried it. It worked -- mostly." and row["ideal"] == "x"


@pytest.mark.parametrize(
    "tokens, sentence",
    [
        (
            "At Bank ' s request , Borrower will pay ( A ) fees ;",
            "At Bank's request, Borrower will pay (A) fees;",
        ),
        ("Lenders ’ co - made loans and / or fees .", "Lenders’ co-made loans and/or fees."),
        ("all Subsidiaries ' shares", "all Subsidiaries' shares"),
    ],
)
def test_contract_sentence_joins_tokens(tokens, sentence):
    row = only("contract_sentence", chat("system", tokens, ideal="No entities found"))
    assert row["sentence"] == sentence and row["opening"] == sentence.split()[0]
    assert row["ideal"] == "No entities found"


def test_first_turn():
    row = only("first_turn", {"turns": ["one", "two"], "category": "stem", "reference": ["r1", "r2"]})
    assert (row["question"], row["answer"], row["category"]) == ("one", "r1", "stem")
    assert only("first_turn", {"turns": ["one"]})["answer"] is None


def test_first_turn_of_the_hub_copy():
    row = only("first_turn", {"prompt": [" one ", "two"], "category": "coding", "reference": []})
    assert row["question"] == "one" and row["answer"] is None and row["category"] == "coding"


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": " hi "}, {"from": "gpt", "value": "ho"}]},
        {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "ho"},
                {"role": "user", "content": "again"},
            ]
        },
    ],
)
def test_first_user_message_in_every_form(record):
    row = only("first_user_message", record)
    assert (row["question"], row["answer"]) == ("hi", "ho")


def test_conversations_that_the_user_does_not_begin_yield_nothing():
    begun = {"conversations": [{"from": "gpt", "value": "and so on"}, {"from": "human", "value": "go on"}]}
    assert list(get_reader("first_user_message", "")(begun)) == []
    assert list(get_reader("first_user_message", "")({"messages": []})) == []
    assert only("first_user_message", {"messages": [{"role": "user", "content": "hi"}]})["answer"] is None


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
