//! [`Routing`]: which experts tokens may go to and how they are chosen, and its validation into a [`CheckedRouting`].

use qgemm_formats::DType;
use qgemm_hal::op::routing::{MOST_EXPERTS, MOST_TOKENS, MOST_TOP_K};
use qgemm_hal::{CheckedRouting, ExpertGroups, RoutingSource, Scoring};

use crate::error::Error;
use crate::operand::{Stored, WIDE_ACCESS};

/// The experts of each token, chosen from logits or given, described for [`Context::plan_routing`].
///
/// A token gets the experts of its `top_k` largest logits, in that order; of equal ones the lower id, and never one that is NaN.
/// Their weights are their scores: softmax over the token's logits that are numbers, unless said otherwise, computed in f32. With a
/// bias or groups, scores plus bias are compared in place of the logits. A token whose logits leave fewer experts has id −1 and weight
/// 0 in the slots that are left, and the status says so.
///
/// [`Context::plan_routing`]: crate::Context::plan_routing
#[derive(Clone, Debug)]
pub struct Routing {
    tokens: usize,
    experts: usize,
    top_k: usize,
    /// `None` where ids are given.
    logits: Option<DType>,
    row_stride: Option<u64>,
    alignment: usize,
    scoring: Scoring,
    renormalize: bool,
    scale: f32,
    bias: bool,
    groups: Option<ExpertGroups>,
    lists: bool,
    shared: bool,
}

impl Routing {
    /// Chooses `top_k` of `experts` experts for each token from logits of type `dtype`, `[tokens, experts]`. There may be 0 tokens: a run
    /// of such a plan writes lists without slots, and a status without a fault.
    pub fn from_logits(tokens: usize, experts: usize, top_k: usize, dtype: DType) -> Self {
        Self {
            tokens,
            experts,
            top_k,
            logits: Some(dtype),
            row_stride: None,
            alignment: WIDE_ACCESS,
            scoring: Scoring::default(),
            renormalize: false,
            scale: 1.0,
            bias: false,
            groups: None,
            lists: false,
            shared: false,
        }
    }

    /// Takes the caller's ids, i32 `[tokens, top_k]`, and makes lists of them. Ids that are no expert's are in none, and the status
    /// says so.
    pub fn from_ids(tokens: usize, experts: usize, top_k: usize) -> Self {
        Self { logits: None, lists: true, ..Self::from_logits(tokens, experts, top_k, DType::F32) }
    }

    /// Elements from one row of the logits to the next: at least the experts.
    pub fn row_stride(mut self, elements: u64) -> Self {
        self.row_stride = Some(elements);
        self
    }

    /// What the address of the logits is a multiple of, in bytes, at every run. 16 when not given.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// What a logit becomes: softmax when not given.
    pub fn scoring(mut self, scoring: Scoring) -> Self {
        self.scoring = scoring;
        self
    }

    /// Divides the weights of a token by their sum.
    pub fn renormalized(mut self) -> Self {
        self.renormalize = true;
        self
    }

    /// Multiplies every weight, after it was divided: the routed scaling factor.
    pub fn scale(mut self, factor: f32) -> Self {
        self.scale = factor;
        self
    }

    /// Adds a bias, an f32 an expert, to scores where they are compared; weights are without it.
    pub fn biased(mut self) -> Self {
        self.bias = true;
        self
    }

    /// Cuts the experts into `groups` groups of neighbours, of which a token uses the best `chosen`: those whose two best scores, with
    /// bias, have the largest sums (a group of one has one), of equal ones the lower. What DeepSeek-V3 does.
    pub fn groups(mut self, groups: usize, chosen: usize) -> Self {
        self.groups = Some(ExpertGroups { groups, chosen });
        self
    }

    /// Also writes which slots each expert has: see [`RoutingLists`](crate::RoutingLists).
    pub fn lists(mut self) -> Self {
        self.lists = true;
        self
    }

    /// Gives every token one more expert, whose id is the number of the others, in one more slot, its last, with weight 1: an expert that
    /// is not chosen, and has no logit. Lists have it like the others. Only of logits.
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// The last of the experts is the one that every token has.
    pub(crate) fn sharing_last(self) -> Self {
        Self { experts: self.experts.saturating_sub(1), shared: true, ..self }
    }

    /// The same of another number of tokens.
    pub(crate) fn of_tokens(self, tokens: usize) -> Self {
        Self { tokens, ..self }
    }

    /// Validates everything that does not depend on the buffers of a run.
    pub(crate) fn check(&self) -> Result<CheckedRouting, Error> {
        let &Self { tokens, experts, top_k, scoring, renormalize, scale, bias, groups, lists, shared, .. } = self;
        let more = usize::from(shared);
        let sizes = [
            ("tokens", tokens, 0, MOST_TOKENS),
            ("experts", experts, 1, MOST_EXPERTS - more),
            ("experts of a token", top_k, 1, (MOST_TOP_K - more).min(experts)),
        ];
        for (name, got, least, most) in sizes {
            if !(least..=most).contains(&got) {
                return Err(Error::OutOfRange { name, least, most, got });
            }
        }
        if !scale.is_finite() {
            return Err(Error::NonFiniteScalar { name: "scale", got: scale });
        }
        if let Some(ExpertGroups { groups, chosen }) = groups {
            let divides = groups > 0 && experts.is_multiple_of(groups);
            if !divides || !(1..=groups).contains(&chosen) || chosen * (experts / groups) < top_k {
                return Err(Error::ExpertGroups { experts, top_k, groups, chosen });
            }
        }
        let from = match self.logits {
            Some(dtype) => {
                let stored =
                    Stored { name: "logits", rows: tokens, columns: experts, dtype, alignment: self.alignment };
                RoutingSource::Logits(stored.check(self.row_stride)?)
            }
            None => {
                let of_logits = [
                    (scoring != Scoring::default(), "a scoring"),
                    (renormalize, "renormalized weights"),
                    (scale != 1.0, "a scale"),
                    (bias, "a bias"),
                    (groups.is_some(), "groups"),
                    (shared, "an expert that every token has"),
                    (self.row_stride.is_some(), "a row stride of logits"),
                ];
                if let Some((_, what)) = of_logits.into_iter().find(|(is_stated, _)| *is_stated) {
                    return Err(Error::RoutingOfIds { what });
                }
                RoutingSource::Ids
            }
        };
        let (experts, top_k) = (experts + more, top_k + more);
        Ok(CheckedRouting { tokens, experts, top_k, from, scoring, renormalize, scale, bias, groups, lists, shared })
    }
}
