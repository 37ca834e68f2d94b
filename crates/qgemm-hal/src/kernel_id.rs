//! [`KernelId`]: kernel identity, comparable by programs and readable by people.
//!
//! An identity consists of operation, family, variant and the
//! operation's keys. Preludes, the kernel cache, `kernels.lock`,
//! tuned tables and emulated objects are keyed by it. Its text
//! is `gemm:gemv:sm80:main_loop=gemv,w=q4_0,x=f16,…`, with `-`
//! for families without variants.

use std::fmt::{self, Write};
use std::str::FromStr;

use qgemm_formats::Format;
use thiserror::Error;

use crate::caps::Variant;
use crate::pack_spec::{AllReduceSpec, PackSpec, ProbeSpec};

/// Kernel identity.
///
/// ```
/// use qgemm_hal::KernelId;
/// let text = "convert:convert:sm80:x=f32,d=f16,transposed=false,row_factors=false,whole_groups=true";
/// let id: KernelId = text.parse()?;
/// assert_eq!((id.operation(), id.to_string().as_str()), ("convert", text));
/// # Ok::<(), qgemm_hal::KernelIdError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId {
    /// The kernel's family.
    pub family: Name,
    /// Generation of instructions, if the backend has several.
    pub variant: Option<Variant>,
    /// The operation's keys.
    pub spec: Spec,
}

macro_rules! specs {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        /// Keys of an operation's kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Spec {
            $($(
                #[doc = concat!("Kernels `", $text, "`: ", $summary, ".")]
                $spec($crate::op::$name::$keys),
            )*)*
            /// Packing of a weight's blocks, run when a weight is loaded.
            Pack(PackSpec),
            /// Probe of the device's bandwidth.
            Probe(ProbeSpec),
            /// All-reduce of a group of GPUs, run as a collective.
            AllReduce(AllReduceSpec),
        }

        impl Spec {
            /// The first word of identities with these keys.
            pub const fn kernels(&self) -> &'static str {
                match self {
                    $($(Spec::$spec(_) => $text,)*)*
                    Spec::Pack(_) => "pack",
                    Spec::Probe(_) => "probe",
                    Spec::AllReduce(_) => "all_reduce",
                }
            }

            fn parse(kernels: &str, keys: &str) -> Result<Self, String> {
                match kernels {
                    $($($text => keys.parse().map(Spec::$spec),)*)*
                    "pack" => keys.parse().map(Spec::Pack),
                    "probe" => keys.parse().map(Spec::Probe),
                    "all_reduce" => keys.parse().map(Spec::AllReduce),
                    other => Err(format!("no operation is called `{other}`")),
                }
            }
        }

        impl fmt::Display for Spec {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $($(Spec::$spec(keys) => keys.fmt(f),)*)*
                    Spec::Pack(keys) => keys.fmt(f),
                    Spec::Probe(keys) => keys.fmt(f),
                    Spec::AllReduce(keys) => keys.fmt(f),
                }
            }
        }
    };
}
crate::with_operations!(specs);

impl Spec {
    /// Format of the weight that the kernel reads, if it reads one.
    pub const fn weight(&self) -> Option<Format> {
        match self {
            Spec::Gemm(spec) | Spec::Experts(spec) => Some(spec.w),
            Spec::Pack(spec) => Some(spec.w),
            Spec::Unpack(spec) => Some(spec.w),
            Spec::GatherRows(spec) => Some(spec.w),
            _ => None,
        }
    }
}

/// A text that is not a kernel identity.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is no kernel identity: {why}")]
pub struct KernelIdError {
    /// The text.
    pub text: String,
    /// The error.
    pub why: String,
}

impl KernelId {
    /// Creates an identity. Names longer than [`Name::MAX`] are a bug.
    pub const fn new(family: &'static str, variant: Option<Variant>, spec: Spec) -> Self {
        Self { family: Name::new(family), variant, spec }
    }

    /// Name of the operation, or of the part of it that the kernel computes.
    pub const fn operation(&self) -> &'static str {
        self.spec.kernels()
    }

    /// The GEMM keys, if it is a product's kernel.
    pub const fn gemm(&self) -> Option<&crate::op::gemm::GemmSpec> {
        match &self.spec {
            Spec::Gemm(spec) => Some(spec),
            _ => None,
        }
    }
}

impl fmt::Display for KernelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.operation(), self.family)?;
        match self.variant {
            Some(variant) => write!(f, "{variant}:")?,
            None => f.write_str("-:")?,
        }
        self.spec.fmt(f)
    }
}

impl FromStr for KernelId {
    type Err = KernelIdError;

    fn from_str(text: &str) -> Result<Self, KernelIdError> {
        let wrong = |why: String| KernelIdError { text: text.to_owned(), why };
        let mut parts = text.splitn(4, ':');
        let mut next = |what: &str| parts.next().ok_or_else(|| wrong(format!("it has no {what}")));
        let (operation, family, variant, keys) = (next("operation")?, next("family")?, next("variant")?, next("keys")?);
        let spec = Spec::parse(operation, keys);
        let variant = match variant {
            "-" => None,
            name => Some(name.parse::<Variant>().map_err(|_| wrong(format!("no variant is called `{name}`")))?),
        };
        Ok(Self { family: family.parse().map_err(wrong)?, variant, spec: spec.map_err(wrong)? })
    }
}

/// A short inline name, so that identities are cheap to copy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    len: u8,
    bytes: [u8; Name::MAX],
}

impl Name {
    /// Maximum bytes of a name.
    pub const MAX: usize = 23;

    /// The name `text`, for constants; other names are parsed.
    ///
    /// # Panics
    /// When it is longer than [`Name::MAX`].
    pub const fn new(text: &str) -> Self {
        assert!(text.len() <= Self::MAX, "a name is too long");
        let mut bytes = [0; Self::MAX];
        let mut i = 0;
        while i < text.len() {
            bytes[i] = text.as_bytes()[i];
            i += 1;
        }
        Self { len: text.len() as u8, bytes }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        // The bytes always come from a whole `str`.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if text.is_empty() || text.len() > Self::MAX || !text.chars().all(is_plain) {
            return Err(format!("`{text}` is no name of at most {} letters, digits and underscores", Self::MAX));
        }
        Ok(Self::new(text))
    }
}

/// Writes `key=value`, with a comma before it
/// unless it is the first.
pub(crate) fn write_key(out: &mut String, key: &str, value: &dyn fmt::Display) {
    let comma = if out.is_empty() { "" } else { "," };
    // Writing to a String cannot fail.
    let _ = write!(out, "{comma}{key}={value}");
}

/// Value of the next of `keys`, which must be named `key`.
pub(crate) fn read_key<'t, T: FromStr>(keys: &mut impl Iterator<Item = &'t str>, key: &str) -> Result<T, String> {
    let pair = keys.next().ok_or_else(|| format!("it ends before `{key}`"))?;
    let value = pair.strip_prefix(key).and_then(|rest| rest.strip_prefix('='));
    let value = value.ok_or_else(|| format!("expected `{key}=…`, and `{pair}` came"))?;
    value.parse().map_err(|_| format!("`{value}` is no value of `{key}`"))
}

/// Defines the keys of an operation's kernels: a struct that prints
/// as `key=value,…` in field order.
macro_rules! spec {
    ($(#[doc = $doc:literal])* pub struct $name:ident { $($(#[doc = $fdoc:literal])+ $field:ident: $ty:ty,)* }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name { $($(#[doc = $fdoc])+ pub $field: $ty,)* }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut out = String::new();
                $($crate::kernel_id::write_key(&mut out, stringify!($field), &self.$field);)*
                f.write_str(&out)
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let mut keys = text.split(',');
                let spec = Self { $($field: $crate::kernel_id::read_key(&mut keys, stringify!($field))?,)* };
                match keys.next() {
                    None => Ok(spec),
                    Some(rest) => Err(format!("`{rest}` follows its last key")),
                }
            }
        }
    };
}
pub(crate) use spec;

#[cfg(test)]
mod tests {
    use qgemm_formats::{DType, XFormat};

    use super::*;
    use crate::axis::KernelDType;
    use crate::op::attention::{AttentionSpec, AttentionStep, KvFormat, KvFormats, KvPaging};
    use crate::op::convert::ConvertSpec;
    use crate::op::experts::{ExpertStep, ExpertStepSpec};
    use crate::op::gemm::GemmSpec;
    use crate::op::indexer::{IndexerSpec, IndexerStep};
    use crate::op::kv_append::{KvAppendSpec, KvAppendStep};
    use crate::op::matmul::{FactorFormat, MatmulLayout, MatmulSpec};
    use crate::op::norm::{NormQuantizeSpec, NormSpec};
    use crate::op::optimizer::{OptimizerSpec, UpdateKind};
    use crate::op::routing::{RoutingSpec, RoutingStep};
    use crate::pack_spec::PackFragments;

    fn gemm(weights: Format, x: XFormat) -> KernelId {
        let spec = GemmSpec {
            main_loop: Name::new("sm90_wgmma_ws"),
            w: weights,
            x,
            n: 128,
            m: 256,
            k: 64,
            threads: 384,
            warps_n: 8,
            k_groups: 1,
            ctas: 1,
            stages: 4,
        };
        KernelId::new("gemm", Some(Variant::Sm90), Spec::Gemm(spec))
    }

    #[test]
    fn identities_survive_their_text() {
        let mut ids: Vec<KernelId> = Vec::new();
        for format in Format::all() {
            ids.extend(XFormat::ALL.map(|x| gemm(format, x)));
            let Spec::Gemm(spec) = gemm(format, XFormat::Plain(DType::F16)).spec else { panic!("it is of gemm") };
            ids.push(KernelId::new("gemm", Some(Variant::Sm80), Spec::Experts(spec)));
            ids.push(KernelId::new("experts", None, Spec::ExpertStep(ExpertStepSpec { step: ExpertStep::Combine })));
            let pack = PackSpec { w: format, fragments: PackFragments::MmaM16 };
            ids.push(KernelId::new("pack", None, Spec::Pack(pack)));
        }
        for (x, d) in DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d))) {
            let spec =
                ConvertSpec { x, d, transposed: x == d, row_factors: d == DType::F16, whole_groups: x == DType::F32 };
            ids.extend(Variant::ALL.map(|v| KernelId::new("convert", Some(v), Spec::Convert(spec))));
        }
        for step in RoutingStep::ALL {
            let spec = RoutingSpec { step, experts: 256 };
            ids.push(KernelId::new("routing", Some(Variant::Sm90), Spec::Routing(spec)));
        }
        for layout in MatmulLayout::ALL.into_iter().chain([MatmulLayout::Any]) {
            let main_loop = Name::new("sm80_cp_async");
            for b in FactorFormat::ALL {
                let spec = MatmulSpec { main_loop, a: DType::BF16.into(), b, layout, m: 128, n: 64, k: 32 };
                ids.push(KernelId::new("matmul", Some(Variant::Sm80), Spec::Matmul(spec)));
            }
        }
        let mixed = KvFormats { k: KvFormat::Q8_0, v: KvFormat::E4M3 };
        for kv in KvFormat::ALL.map(KvFormats::both).into_iter().chain([mixed]) {
            let spec = AttentionSpec::attend(kv, [192, 128], 64, 32);
            let of_steps = AttentionStep::ALL.iter().map(|&step| AttentionSpec { step, ..spec });
            let of_paging = KvPaging::ALL.iter().map(|&paging| AttentionSpec { paging, masked: true, ..spec });
            let of_x = KernelDType::ALL.into_iter().map(|x| AttentionSpec { x, bounded: false, kv_heads: 2, ..spec });
            let all = of_steps.chain(of_paging).chain(of_x);
            ids.extend(all.map(|spec| KernelId::new("attention_mma", Some(Variant::Sm80), Spec::Attention(spec))));
        }
        for (step, kv) in KvAppendStep::ALL.into_iter().flat_map(|step| KvFormat::ALL.map(|kv| (step, kv))) {
            let spec = KvAppendSpec { step, x: DType::BF16, kv };
            ids.push(KernelId::new("kv_append", Some(Variant::Sm75), Spec::KvAppend(spec)));
        }
        for x in crate::op::indexer::FORMATS {
            let all = IndexerStep::ALL.iter().map(|&step| IndexerSpec::of(step, x, 128, 256));
            ids.extend(all.map(|spec| KernelId::new("indexer_mma", Some(Variant::Sm89), Spec::Indexer(spec))));
        }
        ids.push(KernelId::new("norm", Some(Variant::Sm90), Spec::Norm(NormSpec::any(2))));
        let spec = NormQuantizeSpec { groups: 2, to: XFormat::NvFp4, given_factor: true, sum_span: 0 };
        ids.push(KernelId::new("norm", Some(Variant::Sm75), Spec::NormQuantize(spec)));
        ids.extend(
            UpdateKind::ALL
                .map(|kind| KernelId::new("optimizer", Some(Variant::Sm80), Spec::Optimizer(OptimizerSpec::new(kind)))),
        );
        ids.push(KernelId::new("read", None, Spec::Probe(ProbeSpec { bytes: 16 })));
        ids.push(KernelId::new("one_shot", Some(Variant::Sm70), Spec::AllReduce(AllReduceSpec { ranks: 8 })));
        for id in ids {
            assert_eq!(id.to_string().parse::<KernelId>().as_ref(), Ok(&id));
        }
    }

    #[test]
    fn what_is_no_identity_says_why() {
        let good = gemm("q4_0".parse().expect("a format"), XFormat::Plain(DType::F16)).to_string();
        let cases = [
            ("gemm", "no family"),
            ("routing:routing:sm80:step=sort,experts=64", "`sort` is no value of `step`"),
            ("conv:a:-:x", "no operation is called `conv`"),
            (
                "convert:convert:sm81:x=f32,d=f16,transposed=false,row_factors=false,whole_groups=true",
                "no variant is called `sm81`",
            ),
            ("convert:convert:-:x=f32,d=f16", "it ends before `transposed`"),
            ("convert:convert:-:d=f16", "expected `x=…`, and `d=f16` came"),
            (
                "convert:convert:-:x=f8,d=f16,transposed=false,row_factors=false,whole_groups=true",
                "`f8` is no value of `x`",
            ),
            (
                "convert:convert:-:x=f32,d=f16,transposed=false,row_factors=true,whole_groups=true,y=1",
                "`y=1` follows its last key",
            ),
            (
                "convert:a-very-long-name-that-no-family-has:-:x=f32,d=f16,transposed=false,row_factors=false,whole_groups=true",
                "is no name",
            ),
            (&good.replace("q4_0", "q4_z"), "`q4_z` is no value of `w`"),
        ];
        for (text, why) in cases {
            let error = text.parse::<KernelId>().expect_err(text).to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
