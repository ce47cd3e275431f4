"""The section `prompt`: how a row becomes a prompt, a conversation, a text, or a pair of texts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from bulkrun.job.jobfile.message_calls import read_calls
from bulkrun.job.jobfile.section import Section
from bulkrun.job.jobfile.template_kwargs import check_template_kwargs
from bulkrun.job.jobfile.tools import AUTO, check_choice, check_tools

_MAPPINGS = ("template", "messages", "column", "token_ids")
_OF_TEXTS = ("system", "chat_template", "chat_template_kwargs", "continue_final_message", "tools", "text_pair")


class ChatMessage(Section):
    """One message of a conversation; `content` is a Jinja template over the row."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="The speaker.")
    content: str = Field(
        description='The text of the message: a Jinja template over the row\'s columns; "" for nothing but tool_calls.'
    )
    tool_calls: list[dict[str, Any]] | None = Field(
        None,
        description="Calls in an assistant's message, as they are: a list of OpenAI's {id, type: function, function: "
        "{name, arguments}}. Default: none.",
    )
    tool_call_id: str | None = Field(None, description="The call that a tool's message answers. Default: none.")

    @model_validator(mode="after")
    def _calls(self) -> ChatMessage:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls: only an assistant calls tools, and the role is {self.role}")
        if self.tool_calls is not None:
            read_calls(self.tool_calls)
        return self


class PromptSpec(Section):
    """How a row becomes a prompt: one of `template`, `messages`, `column`, `token_ids`; with none, the columns tell.

    Looked for in this order: an OpenAI batch line (`custom_id`, `url`, `body`), `messages`, `prompt`, `text`,
    `conversations`; with `task: embed` a batch line, `text`, `prompt`; with `task: classify` `text`, `prompt`. A job of
    pairs of texts also has `text_pair`, or `score_lines` in the place of all of these; one of several texts a row
    `text_lists`.
    """

    template: str | None = Field(
        None,
        description="A Jinja template over the row's columns: the user's message. A column that is not an identifier "
        'is {{ row["first name"] }}. A line break at its very end is dropped, like the one that YAML\'s | adds; write '
        "two to keep one. A special token written in a row's text is that token, as in vLLM and transformers. Default: "
        "the columns tell.",
    )
    messages: list[ChatMessage] | str | None = Field(
        None,
        description="A conversation of templates, or the name of a column that holds a list of messages, {role, "
        "content} or, as in ShareGPT's datasets, {from, value}. With task: classify a whole conversation, its "
        "answer included, is judged (reward models). Default: the columns tell.",
    )
    column: str | None = Field(
        None, description="The name of a column that holds the prompt text. Default: the columns tell."
    )
    token_ids: str | None = Field(
        None,
        description="The name of a column that holds prompts as lists of token ids, those of this model's tokenizer, "
        "which it is given as they are: no chat template, no special tokens that are not among them. Default: the "
        "columns tell.",
    )
    text_pair: str | None = Field(
        None,
        min_length=1,
        description="With task: classify, a second text for a model of pairs (a reranker's document, an NLI model's "
        "hypothesis): a Jinja template over the row's columns. The first is that of template or column. The tokenizer "
        "joins them; special tokens written in them are plain text. Default: texts are single.",
    )
    score_lines: bool = Field(
        False,
        description="With task: classify or embed, the input is an OpenAI batch (custom_id, url, body) of vLLM's "
        "/v1/score and /v1/rerank: a line's body brings its pairs of texts, and the column scores has a number for "
        "each: the model's, or with task: embed the cosine of the two vectors.",
    )
    text_lists: bool = Field(
        False,
        description="With task: embed, a row may have several texts: prompt.column holds texts or lists of them (where "
        "it is one of text, as a CSV's, those are JSON), or lines of an OpenAI batch have lists as their input. The "
        "column embeddings, a list of vectors, stands in the place of embedding.",
    )
    system: str | None = Field(
        None, description="A system message put before the conversation (a template too). Default: none."
    )
    chat_template: str = Field(
        "auto",
        description="auto: the model's chat template, if it has one. none: the text is the prompt as it is. Otherwise, "
        "the path of a Jinja file.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="Values that the chat template reads: {enable_thinking: false} for a plain answer from a model "
        "that can think, such as Qwen3. Values that the template does not read have no effect.",
    )
    continue_final_message: bool = Field(
        False,
        description="The conversation (messages, or a line of an OpenAI batch) ends with an assistant's message whose "
        "text the model goes on with: it is given without what the chat template writes behind a message, and the "
        "response holds only what is new. A structured output is the new text alone.",
    )

    tools: list[dict[str, Any]] | str | None = Field(
        None,
        description="Tools that the model may call, shown to it by the chat template: a list of OpenAI's {type: "
        "function, function: {name, description, parameters: JSON schema}}, or the name of a column that holds such a "
        "list. What it calls goes into a column: sampling.tool_calls. Default: none.",
    )
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = Field(
        "auto",
        description="auto: the model calls tools or answers. none: no tools are shown. required: the output is one "
        "call or more, {type: function, function: {name: ...}}: exactly one of that function; arguments fit the "
        "function's parameters then.",
    )

    @field_validator("tools")
    @classmethod
    def _tools(cls, tools: list[dict[str, Any]] | str | None) -> list[dict[str, Any]] | str | None:
        if isinstance(tools, list):
            check_tools(tools)
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _tool_choice(cls, choice: str | dict[str, Any]) -> str | dict[str, Any]:
        check_choice(choice)
        return choice

    @model_validator(mode="after")
    def _with_tools(self) -> PromptSpec:
        if self.tools is None and self.tool_choice != AUTO:
            raise ValueError("tool_choice: there are no tools to choose from; set prompt.tools")
        if self.tools is not None and self.chat_template == "none":
            raise ValueError("tools: there is no chat template to show them to the model (chat_template: none)")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_kwargs(cls, values: dict[str, Any]) -> dict[str, Any]:
        check_template_kwargs(values)
        return values

    @model_validator(mode="after")
    def _continued(self) -> PromptSpec:
        if self.continue_final_message and (problem := self._why_not_continued()):
            raise ValueError(f"continue_final_message: {problem}")
        return self

    def _why_not_continued(self) -> str | None:
        """Why no row of the job has a message to go on with."""
        if self.chat_template == "none":
            return "without a chat template (chat_template: none) there are no messages: the text itself is continued"
        if self.template is not None or self.column is not None:
            return "the prompt is one message, the user's; write prompt.messages, whose last one is the assistant's"
        last = self.messages[-1] if isinstance(self.messages, list) and self.messages else None
        if self.messages == [] or (last is not None and last.role != "assistant"):
            return "the last of prompt.messages is not the assistant's; add one with what its answer begins with"
        if last is not None and (last.tool_calls or not last.content.strip()):
            return "the last of prompt.messages calls tools or has no text; write what its answer begins with"
        return None

    @model_validator(mode="after")
    def _tokens_as_they_are(self) -> PromptSpec:
        untouched = type(self).model_fields
        others = [key for key in _OF_TEXTS if getattr(self, key) != untouched[key].default]
        if self.chat_template == "none":  # as they are taken anyway
            others.remove("chat_template")
        if self.token_ids is not None and others:
            raise ValueError(f"token_ids: the model is given them as they are; leave out {' and '.join(others)}")
        return self

    @model_validator(mode="after")
    def _at_most_one(self) -> PromptSpec:
        given = [key for key in _MAPPINGS if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"needs one of {', '.join(_MAPPINGS)}; has {' and '.join(given)}")
        given += [] if self.text_pair is None else ["text_pair"]
        given += ["text_lists"] if self.score_lines and self.text_lists else []
        if self.score_lines and given:
            raise ValueError(f"score_lines: the lines' bodies bring the texts; leave out {' and '.join(given)}")
        if self.text_lists and (others := [key for key in given if key != "column"]):
            raise ValueError(
                f"text_lists: a column or a batch's lines bring the texts; leave out {' and '.join(others)}"
            )
        if self.chat_template == "none" and (self.messages is not None or self.system is not None):
            raise ValueError("chat_template: none takes a template or column only: messages need a chat template")
        if self.chat_template == "none" and self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs: there is no chat template to read them (chat_template: none)")
        return self
