//! A recipe as JSON: in a file of its own and in the manifest.

use serde::{Deserialize, Serialize};

use super::{Recipe, Rule};
use crate::digest::Digest;
use crate::quant::{MatrixFormat, Scales};
use crate::tensor_name::TensorClass;
use crate::{Error, Result};

/// Bits by family where that says it all, else rules.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Written {
    Bits(Bits),
    Rules(Rules),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Bits {
    bits: u32,
    mla_bits: u32,
    head_bits: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rules {
    #[serde(skip_serializing_if = "Option::is_none", default)]
    name: Option<String>,
    #[serde(default = "mse")]
    scales: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    calibration: Option<Digest>,
    rules: Vec<WrittenRule>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRule {
    #[serde(skip_serializing_if = "Option::is_none", default)]
    class: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    tensor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    layers: Option<String>,
    format: String,
}

fn mse() -> String {
    Scales::Mse.name().to_owned()
}

impl From<Recipe> for Written {
    fn from(recipe: Recipe) -> Self {
        if let Some((bits, mla_bits, head_bits)) = recipe.as_bits() {
            return Self::Bits(Bits { bits, mla_bits, head_bits });
        }
        let rule = |rule: Rule| WrittenRule {
            class: rule.class.map(|class| class.name().to_owned()),
            tensor: rule.tensor,
            layers: rule.layers.map(|layers| layers.to_string()),
            format: rule.format.name().to_owned(),
        };
        Self::Rules(Rules {
            name: recipe.name,
            scales: recipe.scales.name().to_owned(),
            calibration: recipe.calibration,
            rules: recipe.rules.into_iter().map(rule).collect(),
        })
    }
}

impl TryFrom<Written> for Recipe {
    type Error = Error;

    fn try_from(written: Written) -> Result<Self> {
        match written {
            Written::Bits(Bits { bits, mla_bits, head_bits }) => {
                Self::of_bits(bits, mla_bits, head_bits)
            }
            Written::Rules(written) => {
                let rules = written.rules.into_iter().map(Rule::try_from).collect::<Result<_>>()?;
                let scales = Scales::from_name(&written.scales)?;
                let recipe = Self::new(written.name, rules, scales)?;
                Ok(recipe.with_calibration(written.calibration))
            }
        }
    }
}

impl TryFrom<WrittenRule> for Rule {
    type Error = Error;

    fn try_from(rule: WrittenRule) -> Result<Self> {
        let class = |name: String| {
            let quantizable = || TensorClass::ALL.into_iter().filter(|c| c.is_quantizable());
            quantizable().find(|class| class.name() == name).ok_or_else(|| {
                let names: Vec<_> = quantizable().map(TensorClass::name).collect();
                Error::unsupported(format!(
                    "no class of matrices called {name:?}; there are {}",
                    names.join(", ")
                ))
            })
        };
        let format = MatrixFormat::from_name(&rule.format).ok_or_else(|| {
            let names = MatrixFormat::ALL.map(MatrixFormat::name);
            Error::unsupported(format!(
                "no format called {:?}; there are {}",
                rule.format,
                names.join(", ")
            ))
        })?;
        Ok(Self {
            class: rule.class.map(class).transpose()?,
            tensor: rule.tensor,
            layers: rule.layers.map(|layers| layers.parse()).transpose()?,
            format,
        })
    }
}
