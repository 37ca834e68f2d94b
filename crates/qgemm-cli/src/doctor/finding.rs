//! Lines of the result.

use serde::Serialize;

use crate::table::{Column, Row, words};

/// Judgement of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be, or not needed here.
    Ok,
    /// Works, but slower or with less.
    Warn,
    /// Something that is there or was asked for does not work.
    Fail,
}

/// One line of the result.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub subject: &'static str,
    pub status: Status,
    pub found: String,
    /// Why it matters and what to do; unless all is well.
    pub advice: Option<String>,
}

impl Finding {
    /// Something as it should be.
    pub fn ok(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, status: Status::Ok, found: found.into(), advice: None }
    }

    /// Something that works, but less well.
    pub fn warn(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, status: Status::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    /// Something that does not work.
    pub fn fail(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, status: Status::Fail, found: found.into(), advice: Some(advice.into()) }
    }
}

impl Row for Finding {
    const COLUMNS: &'static [Column] =
        &[words("", 4), words("subject", 13), words("found", 64), words("why it matters, and what to do", 0)];

    fn cells(&self) -> Vec<String> {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        vec![status.to_owned(), self.subject.to_owned(), self.found.clone(), self.advice.clone().unwrap_or_default()]
    }
}
