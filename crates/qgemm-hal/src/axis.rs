//! Axes of kernel identities: closed sets of values that print as
//! names and refuse unknown names.

use std::fmt;
use std::str::FromStr;

use qgemm_formats::DType;

/// Defines an axis: an enum whose variants print as names.
macro_rules! axis {
    ($(#[doc = $doc:literal])+ pub enum $axis:ident: $what:literal {
        $($(#[doc = $vdoc:literal])+ $variant:ident: $name:literal,)+
    }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $axis { $($(#[doc = $vdoc])+ $variant,)+ }

        impl $axis {
            /// All values.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Lower-case name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl std::fmt::Display for $axis {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $axis {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = Self::ALL.iter().copied().find(|value| value.name() == text);
                found.ok_or_else(|| format!("`{text}` is no {}", $what))
            }
        }
    };
}
pub(crate) use axis;

/// Element type that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelDType {
    /// The type is a run-time parameter.
    Any,
    /// One type.
    Of(DType),
}

impl KernelDType {
    /// All values.
    pub const ALL: [Self; 4] = [Self::Any, Self::Of(DType::F32), Self::Of(DType::F16), Self::Of(DType::BF16)];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Of(dtype) => dtype.name(),
        }
    }
}

impl fmt::Display for KernelDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KernelDType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == text);
        found.ok_or_else(|| format!("`{text}` is no element type of a kernel"))
    }
}
