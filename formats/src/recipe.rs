//! Which number format each matrix is stored in, and how its scales are chosen.
//!
//! A recipe is a list of rules; the first that fits a matrix decides. Some have names
//! ([`Recipe::named`]); any other is a JSON file, whose form the manifest records too.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::quant::{MatrixFormat, Scales};
use crate::tensor_name::{TensorClass, TensorSpec};
use crate::{Error, Result, text_file};

mod layers;
mod written;

pub use layers::Layers;
use written::Written;

/// Longest recipe file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Most rules of a recipe: one for each matrix of the release, several times over.
const MAX_RULES: usize = 8192;

/// Formats by matrix, and the choice of scales.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Written", try_from = "Written")]
pub struct Recipe {
    name: Option<String>,
    rules: Vec<Rule>,
    scales: Scales,
    /// Of the statistics that [`Scales::Hessian`] weighs errors with.
    calibration: Option<Digest>,
}

/// A format for the matrices that fit all of the rule's conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Only this family.
    pub class: Option<TensorClass>,
    /// Only names that end with this, whole components: `self_attn.o_proj.weight`.
    pub tensor: Option<String>,
    /// Only these layers.
    pub layers: Option<Layers>,
    /// How they are stored; rows that do not divide into the format's groups as int8.
    pub format: MatrixFormat,
}

impl Rule {
    /// For every matrix.
    pub fn all(format: MatrixFormat) -> Self {
        Self { class: None, tensor: None, layers: None, format }
    }

    /// For one family.
    pub fn class(class: TensorClass, format: MatrixFormat) -> Self {
        Self { class: Some(class), ..Self::all(format) }
    }

    fn fits(&self, spec: &TensorSpec) -> bool {
        let ends = |name: &String| {
            spec.name.strip_suffix(name.as_str()).is_some_and(|s| s.is_empty() || s.ends_with('.'))
        };
        let within = |layers: &Layers| spec.layer.is_some_and(|layer| layers.contains(layer));
        self.class.is_none_or(|class| class == spec.class)
            && self.tensor.as_ref().is_none_or(ends)
            && self.layers.as_ref().is_none_or(within)
    }

    fn covers_all(&self) -> bool {
        self.class.is_none() && self.tensor.is_none() && self.layers.is_none()
    }
}

impl Default for Recipe {
    /// `seed`.
    fn default() -> Self {
        Self::of_formats(MatrixFormat::Int4G64, MatrixFormat::Int8Row, MatrixFormat::Int8Row)
    }
}

impl Recipe {
    /// Names that [`Recipe::named`] knows, with what they are.
    pub const NAMES: [(&str, &str); 4] = [
        ("seed", "int4-g64, MLA and head int8, absmax scales: what other K3 engines read"),
        ("fast", "the same formats, scales by least squared error"),
        (
            "balanced",
            "int4-g32, head and most KDA outputs int8, least squared error; fits seed's bytes",
        ),
        ("faithful", "int8 everywhere, least squared error"),
    ];

    /// The recipe called `name`, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        use MatrixFormat::Int8Row;
        let recipe = match name {
            "seed" => return Some(Self::default()),
            "fast" => Self::default(),
            "balanced" => Self::balanced(),
            "faithful" => Self::of_formats(Int8Row, Int8Row, Int8Row),
            _ => return None,
        };
        Some(Self { name: Some(name.to_owned()), scales: Scales::Mse, ..recipe })
    }

    /// What int8 MLA costs `seed` and gains little, spent where it gains most: on the output
    /// projections of KDA, in as many of the release's layers as that pays for.
    fn balanced() -> Self {
        use MatrixFormat::{Int4G32, Int8Row};
        let outputs = Rule {
            tensor: Some("self_attn.o_proj.weight".to_owned()),
            layers: Some((0..84).collect()),
            ..Rule::class(TensorClass::Kda, Int8Row)
        };
        let rules = vec![outputs, Rule::class(TensorClass::Head, Int8Row), Rule::all(Int4G32)];
        Self { name: None, rules, scales: Scales::Mse, calibration: None }
    }

    /// A recipe from its rules.
    ///
    /// # Errors
    /// There are too many, a name is too long, or the last rule does not cover all that no
    /// other covers.
    pub fn new(name: Option<String>, rules: Vec<Rule>, scales: Scales) -> Result<Self> {
        if rules.len() > MAX_RULES {
            let problem = format!("expected at most {MAX_RULES} rules, found {}", rules.len());
            return Err(Error::unsupported(problem));
        }
        if !rules.last().is_some_and(Rule::covers_all) {
            return Err(Error::malformed("the last rule of a recipe must cover every matrix")
                .hint("end the rules with {\"format\": \"int4-g32\"}, or another format"));
        }
        if name.as_ref().is_some_and(|name| name.len() > 100 || name.contains(char::is_control)) {
            return Err(Error::malformed("a recipe's name is at most 100 printable bytes"));
        }
        Ok(Self { name, rules, scales, calibration: None })
    }

    /// The recipe that bits by family ask for: 4, 8, or 16 to keep BF16.
    ///
    /// # Errors
    /// Another number of bits.
    pub fn of_bits(bits: u32, mla_bits: u32, head_bits: u32) -> Result<Self> {
        let format = MatrixFormat::of_bits;
        Ok(Self::of_formats(format(bits)?, format(mla_bits)?, format(head_bits)?))
    }

    /// One format for MLA, one for the head and one for all else.
    fn of_formats(others: MatrixFormat, mla: MatrixFormat, head: MatrixFormat) -> Self {
        let rules = vec![
            Rule::class(TensorClass::Mla, mla),
            Rule::class(TensorClass::Head, head),
            Rule::all(others),
        ];
        Self { name: None, rules, scales: Scales::Absmax, calibration: None }
    }

    /// Reads a recipe file.
    ///
    /// # Errors
    /// It cannot be read, or is no recipe.
    pub fn read(path: &Path) -> Result<Self> {
        let text = text_file::read(path, MAX_FILE)?;
        Self::parse(&text).map_err(|e| e.in_file(path))
    }

    /// Parses the text of a recipe file.
    ///
    /// # Errors
    /// It is no recipe.
    pub fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|e| {
            Error::malformed(format!("not a recipe: {e}"))
                .hint("formats/README.md shows the keys of a recipe")
        })
    }

    /// The same formats with other scales.
    #[must_use]
    pub fn with_scales(mut self, scales: Scales) -> Self {
        self.scales = scales;
        self
    }

    /// The same recipe, which will weigh errors with the statistics of this digest.
    #[must_use]
    pub fn with_calibration(mut self, calibration: Option<Digest>) -> Self {
        self.calibration = calibration;
        self
    }

    /// Its name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// How scales are chosen.
    pub fn scales(&self) -> Scales {
        self.scales
    }

    /// Digest of the calibration file it was made with.
    pub fn calibration(&self) -> Option<Digest> {
        self.calibration
    }

    /// The format a tensor is stored in, or `None` if it passes through unchanged.
    pub fn format_of(&self, spec: &TensorSpec) -> Option<MatrixFormat> {
        let (_, cols) = spec.matrix_dims()?;
        let rule = self.rules.iter().find(|rule| rule.fits(spec));
        rule.map(|rule| rule.format.in_whole_groups(cols))
    }

    /// (bits, MLA bits, head bits), if it is made of nothing else.
    fn as_bits(&self) -> Option<(u32, u32, u32)> {
        let bits = |rule: &Rule| match rule.format {
            MatrixFormat::Bf16 => Some(16),
            MatrixFormat::Int8Row => Some(8),
            MatrixFormat::Int4G64 => Some(4),
            MatrixFormat::Int4G32 => None,
        };
        let [mla, head, all] = &self.rules[..] else { return None };
        let same = *mla == Rule::class(TensorClass::Mla, mla.format)
            && *head == Rule::class(TensorClass::Head, head.format)
            && all.covers_all()
            && self.scales == Scales::Absmax
            && self.name.is_none();
        same.then_some((bits(all)?, bits(mla)?, bits(head)?))
    }
}

impl fmt::Display for Recipe {
    /// The options that ask for it, as far as they can tell.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((bits, mla_bits, head_bits)) = self.as_bits() {
            return write!(f, "--bits {bits} --mla-bits {mla_bits} --head-bits {head_bits}");
        }
        match (&self.name, &self.rules[..]) {
            (Some(name), _) => write!(f, "--recipe {name}")?,
            (None, [one]) => write!(f, "{} everywhere", one.format.name())?,
            (None, rules) => write!(f, "a recipe of {} rules", rules.len())?,
        }
        write!(f, " --scales {}", self.scales.name())
    }
}

#[cfg(test)]
mod tests;
