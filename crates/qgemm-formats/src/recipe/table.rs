//! The recipes of llama.cpp, tensor for tensor as its
//! `llama_tensor_get_type` chooses.

use super::rules::{RecipeDesc, Rule, When};
use crate::desc::FormatDesc;
use crate::formats::iq4_nl::IQ4_NL;
use crate::formats::iq4_xs::IQ4_XS;
use crate::formats::mxfp4::MXFP4;
use crate::formats::plain::{BF16, F16, F32};
use crate::formats::q2_k::Q2_K;
use crate::formats::q3_k::Q3_K;
use crate::formats::q4_0::Q4_0;
use crate::formats::q4_1::Q4_1;
use crate::formats::q4_k::Q4_K;
use crate::formats::q5_0::Q5_0;
use crate::formats::q5_1::Q5_1;
use crate::formats::q5_k::Q5_K;
use crate::formats::q6_k::Q6_K;
use crate::formats::q8_0::Q8_0;
use crate::formats::ternary::TQ2_0;

const fn rule(when: &'static [When], format: &'static FormatDesc) -> Rule {
    Rule { when, format }
}

/// A recipe without rules.
const fn plain(name: &'static str, file_type: u32, format: &'static FormatDesc) -> RecipeDesc {
    RecipeDesc {
        name,
        alias: None,
        file_type,
        format,
        attn_v: &[],
        attn_output: &[],
        ffn_down: &[],
        embedding: None,
        only_experts: false,
        needs_importance: false,
    }
}

const FALCON: When = When::Falcon;
const NOT_FALCON: When = When::Not(&When::Falcon);
const FEW_EXPERTS: When = When::Not(&When::EightExperts);

/// Output projections of layers with eight experts, which
/// are small beside them.
const OF_EIGHT: [Rule; 1] = [rule(&[NOT_FALCON, When::EightExperts], &Q5_K)];

/// Value projections of IQ4_NL and IQ4_XS.
const IQ4_ATTN_V: [Rule; 1] = [rule(&[When::GroupedQueries], &Q5_K)];
/// Down projections of IQ4_NL and IQ4_XS.
const IQ4_FFN_DOWN: [Rule; 1] = [rule(&[When::FirstPart(8), When::Not(&When::Importance)], &Q5_K)];

/// IQ4_NL and IQ4_XS.
const fn iq4(name: &'static str, file_type: u32, format: &'static FormatDesc) -> RecipeDesc {
    RecipeDesc {
        attn_v: &IQ4_ATTN_V,
        attn_output: &OF_EIGHT,
        ffn_down: &IQ4_FFN_DOWN,
        ..plain(name, file_type, format)
    }
}

/// All recipes.
pub(super) static RECIPES: [RecipeDesc; 22] = [
    plain("F32", 0, &F32),
    plain("F16", 1, &F16),
    plain("BF16", 32, &BF16),
    plain("Q8_0", 7, &Q8_0),
    // Q4_0 and Q5_0 go astray in the first layers even with importances.
    RecipeDesc { ffn_down: &[rule(&[When::Importance, When::FirstPart(8)], &Q4_1)], ..plain("Q4_0", 2, &Q4_0) },
    plain("Q4_1", 3, &Q4_1),
    RecipeDesc { ffn_down: &[rule(&[When::Importance, When::FirstPart(8)], &Q5_1)], ..plain("Q5_0", 8, &Q5_0) },
    plain("Q5_1", 9, &Q5_1),
    RecipeDesc {
        attn_v: &[rule(&[When::GroupedQueries], &Q4_K), rule(&[], &Q3_K)],
        attn_output: &[rule(&[NOT_FALCON, When::EightExperts], &Q5_K), rule(&[NOT_FALCON], &Q3_K)],
        ffn_down: &[rule(&[], &Q3_K)],
        ..plain("Q2_K", 10, &Q2_K)
    },
    RecipeDesc {
        attn_v: &[rule(&[When::GroupedQueries], &Q4_K)],
        ffn_down: &[rule(&[When::FirstPart(8)], &Q4_K)],
        needs_importance: true,
        ..plain("Q2_K_S", 21, &Q2_K)
    },
    RecipeDesc { attn_output: &OF_EIGHT, ..plain("Q3_K_S", 11, &Q3_K) },
    RecipeDesc {
        alias: Some("Q3_K"),
        attn_v: &[rule(&[When::First(2)], &Q5_K), rule(&[], &Q4_K)],
        attn_output: &[rule(&[NOT_FALCON, When::EightExperts], &Q5_K), rule(&[NOT_FALCON], &Q4_K)],
        ffn_down: &[rule(&[When::FirstPart(16)], &Q5_K), rule(&[NOT_FALCON], &Q4_K), rule(&[When::MoreBits], &Q4_K)],
        ..plain("Q3_K_M", 12, &Q3_K)
    },
    RecipeDesc {
        attn_v: &[rule(&[], &Q5_K)],
        attn_output: &[rule(&[FALCON], &Q4_K), rule(&[FEW_EXPERTS], &Q5_K)],
        ffn_down: &[rule(&[FALCON], &Q4_K), rule(&[], &Q5_K)],
        ..plain("Q3_K_L", 13, &Q3_K)
    },
    RecipeDesc {
        attn_v: &[rule(&[When::First(4)], &Q5_K)],
        attn_output: &OF_EIGHT,
        ffn_down: &[rule(&[NOT_FALCON, When::FirstPart(8)], &Q5_K)],
        ..plain("Q4_K_S", 14, &Q4_K)
    },
    RecipeDesc {
        alias: Some("Q4_K"),
        attn_v: &[rule(&[When::MoreBits], &Q6_K)],
        attn_output: &OF_EIGHT,
        ffn_down: &[
            rule(&[NOT_FALCON, When::MoreBits], &Q6_K),
            rule(&[FALCON, When::FirstPart(16)], &Q6_K),
            rule(&[FALCON, When::MoreBits], &Q5_K),
        ],
        ..plain("Q4_K_M", 15, &Q4_K)
    },
    plain("Q5_K_S", 16, &Q5_K),
    RecipeDesc {
        alias: Some("Q5_K"),
        attn_v: &[rule(&[When::MoreBits], &Q6_K)],
        ffn_down: &[rule(&[When::MoreBits], &Q6_K)],
        ..plain("Q5_K_M", 17, &Q5_K)
    },
    plain("Q6_K", 18, &Q6_K),
    iq4("IQ4_NL", 25, &IQ4_NL),
    iq4("IQ4_XS", 30, &IQ4_XS),
    RecipeDesc { embedding: Some(&Q4_K), ..plain("TQ2_0", 37, &TQ2_0) },
    RecipeDesc { only_experts: true, ..plain("MXFP4_MOE", 38, &MXFP4) },
];
