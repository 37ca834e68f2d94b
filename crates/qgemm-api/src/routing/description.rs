//! Routing problem: the builder [`Routing`] and its validation
//! into a [`CheckedRouting`].

use std::ops::Range;

use qgemm_formats::DType;
use qgemm_hal::op::routing::{MOST_EXPERTS, MOST_TOKENS, MOST_TOP_K};
use qgemm_hal::{CheckedRouting, ExpertGroups, RoutingSource, Scoring};

use crate::error::Error;
use crate::operand::{Stored, WIDE_ACCESS};

/// Router top-k and expert lists, from logits or given ids; for
/// [`Context::plan_routing`].
///
/// A token gets the experts of its `top_k` largest logits, in descending order.
/// Ties take the lower id; NaN is never selected. Weights are the scores: by
/// default the softmax over the token's non-NaN logits, in f32. With a bias or
/// groups, the top-k compares scores plus bias instead of logits. Slots without
/// an expert have id −1 and weight 0, and the status reports them.
///
/// ```
/// use qgemm_api::{Context, DType, Routing, RoutingArgs};
///
/// // The best two of four experts, with weights that add up to 1.
/// let ctx = Context::open("cpu")?;
/// let plan = ctx.plan_routing(&Routing::from_logits(1, 4, 2, DType::F32).renormalized())?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let logits = ctx.upload(&[0.0f32, 3.0, -1.0, 3.0])?;
/// let (mut ids, mut weights) = (ctx.allocate(2 * 4)?, ctx.allocate(2 * 4)?);
/// let mut status = ctx.allocate(16)?;
/// let args = RoutingArgs::of_logits(&logits, &mut ids, &mut weights, &mut status).workspace(&mut workspace);
/// plan.run(&ctx.default_stream(), args)?;
/// plan.check_status(&ctx, &status)?;
/// assert_eq!(ctx.download::<u32>(&ids)?, [1, 3]);
/// assert_eq!(ctx.download::<f32>(&weights)?, [0.5, 0.5]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// [`Context::plan_routing`]: crate::Context::plan_routing
#[derive(Clone, Debug)]
pub struct Routing {
    tokens: usize,
    experts: usize,
    top_k: usize,
    /// Type of the logits. `None` when ids are given.
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
    /// Local experts; all by default.
    local: Option<Range<usize>>,
}

impl Routing {
    /// Selects `top_k` of `experts` experts per token from logits
    /// `[tokens, experts]` of type `dtype`. With 0 tokens a run writes empty
    /// lists and a clean status.
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
            local: None,
        }
    }

    /// Takes ids, i32 `[tokens, top_k]`, and makes lists of them. Invalid ids are
    /// in no list, and the status reports them.
    pub fn from_ids(tokens: usize, experts: usize, top_k: usize) -> Self {
        Self { logits: None, lists: true, ..Self::from_logits(tokens, experts, top_k, DType::F32) }
    }

    /// Row stride of the logits in elements, at least the experts.
    pub fn row_stride(mut self, elements: u64) -> Self {
        self.row_stride = Some(elements);
        self
    }

    /// Alignment of the address of the logits in every run,
    /// in bytes. 16 by default.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Scoring function of a logit. Softmax by default.
    pub fn scoring(mut self, scoring: Scoring) -> Self {
        self.scoring = scoring;
        self
    }

    /// Renormalizes the weights of a token to a sum of 1.
    pub fn renormalized(mut self) -> Self {
        self.renormalize = true;
        self
    }

    /// Routed scaling factor: multiplies every weight, after renormalization.
    pub fn scale(mut self, factor: f32) -> Self {
        self.scale = factor;
        self
    }

    /// Score-correction bias, f32 per expert. It affects the
    /// selection, not the weights.
    pub fn biased(mut self) -> Self {
        self.bias = true;
        self
    }

    /// Group-limited top-k of DeepSeek-V3: `groups` groups of consecutive experts,
    /// of which a token uses the best `chosen`.
    ///
    /// A group's score is the sum of its two best scores with bias (or of its only
    /// one). Ties take the lower group.
    pub fn groups(mut self, groups: usize, chosen: usize) -> Self {
        self.groups = Some(ExpertGroups { groups, chosen });
        self
    }

    /// Also writes the slots of each expert: see
    /// [`RoutingLists`](crate::RoutingLists).
    pub fn lists(mut self) -> Self {
        self.lists = true;
        self
    }

    /// Adds a shared expert: every token uses it in an extra
    /// last slot with weight 1.
    ///
    /// Its id is the number of the other experts, and it has no logit.
    /// Lists include it. Only with logits.
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Expert parallelism: this device has the weights of the experts in `range` alone.
    ///
    /// Experts are chosen among all. Ids and lists count from the first local expert. Slots
    /// of other experts get the id −2 and weight 0, are in no list, and are no fault.
    /// Only with logits. A [shared](Routing::shared) expert counts as the last one.
    pub fn local(mut self, range: Range<usize>) -> Self {
        self.local = Some(range);
        self
    }

    /// Makes the last expert the shared one.
    pub(crate) fn sharing_last(self) -> Self {
        Self { experts: self.experts.saturating_sub(1), shared: true, ..self }
    }

    /// Local experts among `experts`.
    pub(crate) fn local_among(self, range: Range<usize>, experts: usize) -> Self {
        Self { experts, local: Some(range), ..self }
    }

    /// Same routing of another number of tokens.
    pub(crate) fn of_tokens(self, tokens: usize) -> Self {
        Self { tokens, ..self }
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedRouting, Error> {
        let &Self { tokens, experts, top_k, scoring, renormalize, scale, bias, groups, lists, shared, .. } = self;
        let local = self.local.clone();
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
                    (local.is_some(), "local experts"),
                ];
                if let Some((_, what)) = of_logits.into_iter().find(|(is_stated, _)| *is_stated) {
                    return Err(Error::RoutingOfIds { what });
                }
                RoutingSource::Ids
            }
        };
        let (experts, top_k) = (experts + more, top_k + more);
        let local = local.unwrap_or(0..experts);
        if local.is_empty() || local.end > experts {
            return Err(Error::LocalExperts { experts, got: local });
        }
        Ok(CheckedRouting {
            tokens,
            experts,
            top_k,
            from,
            scoring,
            renormalize,
            scale,
            bias,
            groups,
            lists,
            shared,
            local,
        })
    }
}
