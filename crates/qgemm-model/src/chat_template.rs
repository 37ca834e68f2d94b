//! Chat templates (Jinja).

use std::path::Path;
use std::time::SystemTime;

use jiff::ZonedDateTime;
use jiff::fmt::strtime;
use jiff::tz::TimeZone;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value, context};
use qgemm_api::Model;
use qgemm_api::gguf::GgufValue;

use crate::beside::{json_beside, text_beside};
use crate::error::Error;

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
    /// Time of `strftime_now`, if not the clock's.
    time: Option<ZonedDateTime>,
}

impl ChatTemplate {
    /// A template; `bos_token` and `eos_token` are the texts of special tokens.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with a syntax error.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, Error> {
        environment(None)?.template_from_str(source)?;
        let [source, bos_token, eos_token] = [source, bos_token, eos_token].map(str::to_owned);
        Ok(Self { source, bos_token, eos_token, time: None })
    }

    /// The template at a fixed time, in UTC. Otherwise
    /// `strftime_now` takes the clock's local time.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] when the time is beyond the year 9999.
    pub fn at(self, time: SystemTime) -> Result<Self, Error> {
        let time = jiff::Timestamp::try_from(time).map_err(invalid)?;
        Ok(Self { time: Some(time.to_zoned_datetime(TimeZone::UTC)), ..self })
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
        Ok(environment(self.time.clone())?.template_from_str(&self.source)?.render(values)?)
    }
}

/// The source of the chat template of the model at `path`, if it has one.
///
/// # Errors
/// [`Error::Io`], [`Error::Json`].
pub(crate) fn source(model: &Model, path: &Path) -> Result<Option<String>, Error> {
    if !model.metadata().is_empty() {
        return Ok(model.metadata_value("tokenizer.chat_template").and_then(GgufValue::as_str).map(str::to_owned));
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
fn environment(time: Option<ZonedDateTime>) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |text: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
    });
    environment.add_function("strftime_now", move |format: &str| {
        let now = time.clone().unwrap_or_else(ZonedDateTime::now);
        strtime::format(format, &now).map_err(invalid)
    });
    Ok(environment)
}

/// An error of dates as one of the template.
fn invalid(error: jiff::Error) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
    fn templates_know_the_date() {
        let render = |template: &ChatTemplate| template.render(&[], true).expect("a prompt");
        let source = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %-H:%M') }}{% endif %}";
        let template = ChatTemplate::new(source, "", "").expect("a template");
        let leap_day = SystemTime::UNIX_EPOCH + Duration::from_secs(1_709_209_865);
        assert_eq!(render(&template.clone().at(leap_day).expect("a date")), "29 Feb 2024, 12:31");
        let year = ChatTemplate::new("{{ strftime_now('%Y') }}", "", "").expect("a template");
        assert!(render(&year).parse::<u32>().is_ok_and(|year| year > 2024), "{}", render(&year));
        let wrong = ChatTemplate::new("{{ strftime_now('%') }}", "", "").expect("a template");
        assert!(matches!(wrong.render(&[], true), Err(Error::ChatTemplate { .. })));
    }

    #[test]
    fn errors_of_templates_are_typed() {
        assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(Error::ChatTemplate { .. })));
        let template = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", "", "").expect("a template");
        let Err(Error::ChatTemplate { source }) = template.render(&[], true) else { panic!("no refusal") };
        assert!(source.to_string().contains("roles must alternate"), "{source}");
    }
}
