//! Chat templates (Jinja).

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value, context};
use qgemm_api::Model;
use qgemm_api::gguf::GgufValue;

use crate::error::Error;
use crate::settings::{json_beside, metadata, text_beside};

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant` or another role that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }

    /// A message that sets the assistant's task.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".into(), content: content.into() }
    }

    /// A message of the assistant.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant".into(), content: content.into() }
    }
}

/// The chat template of a model, which puts special tokens around messages.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// A template; `bos_token` and `eos_token` are the texts of special tokens.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with a syntax error.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, Error> {
        environment()?.template_from_str(source)?;
        Ok(Self { source: source.to_owned(), bos_token: bos_token.to_owned(), eos_token: eos_token.to_owned() })
    }

    /// The prompt for messages. With `reply`, it ends where the assistant begins.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`], also when the template refuses the messages.
    pub fn render(&self, messages: &[Message], reply: bool) -> Result<String, Error> {
        let message = |message: &Message| context! { role => &*message.role, content => &*message.content };
        let values = context! {
            messages => messages.iter().map(message).collect::<Vec<Value>>(),
            add_generation_prompt => reply,
            bos_token => &*self.bos_token,
            eos_token => &*self.eos_token,
            tools => (),
            documents => (),
        };
        Ok(environment()?.template_from_str(&self.source)?.render(values)?)
    }
}

/// The source of the chat template of the model at `path`, if it has one.
///
/// # Errors
/// [`Error::Io`], [`Error::Json`].
pub(crate) fn source(model: &Model, path: &Path) -> Result<Option<String>, Error> {
    if !model.metadata().is_empty() {
        return Ok(metadata(model, "tokenizer.chat_template").and_then(GgufValue::as_str).map(str::to_owned));
    }
    if let Some(text) = text_beside(path, "chat_template.jinja")? {
        return Ok(Some(text));
    }
    let config = json_beside(path, "tokenizer_config.json")?.unwrap_or_default();
    let template = &config["chat_template"];
    // A list has templates by name.
    let default = template.as_array().and_then(|all| all.iter().find(|one| one["name"] == "default"));
    Ok(template.as_str().or_else(|| default?["template"].as_str()).map(str::to_owned))
}

/// Jinja as `transformers` sets it up.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |text: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
    });
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for m in messages %}\n{{'<|im_start|>' + m['role'] + '\n' + m['content'].strip() + '<|im_end|>\n'}}\
        {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    #[test]
    fn messages_become_a_prompt() {
        let template = ChatTemplate::new(CHATML, "", "").expect("a template");
        let messages = [Message::system("Be brief."), Message::user(" Hi ")];
        let expected =
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(template.render(&messages, true).expect("a prompt"), expected);
        assert!(!template.render(&messages, false).expect("a prompt").contains("assistant"));
    }

    #[test]
    fn special_tokens_and_absent_tools_are_known() {
        let source = "{{ bos_token }}{% if tools is not none %}tools{% endif %}{{ messages[0].content | tojson }}{{ eos_token }}";
        let template = ChatTemplate::new(source, "<s>", "</s>").expect("a template");
        assert_eq!(template.render(&[Message::user("a")], true).expect("a prompt"), "<s>\"a\"</s>");
    }

    #[test]
    fn errors_of_templates_are_typed() {
        assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(Error::ChatTemplate { .. })));
        let template = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", "", "").expect("a template");
        let Err(Error::ChatTemplate { source }) = template.render(&[], true) else { panic!("no refusal") };
        assert!(source.to_string().contains("roles must alternate"), "{source}");
    }
}
