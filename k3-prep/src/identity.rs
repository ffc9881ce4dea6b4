//! What is converted and how: two conversions with the same identity write the same bytes.

use k3_formats::container::EXPERT_TABLE_FILE;
use k3_formats::container::manifest::{FORMAT_VERSION, Manifest, ShardRecord};
use k3_formats::digest::Digest;
use k3_formats::expert_table::without_checksums;
use k3_formats::recipe::Recipe;
use serde::{Deserialize, Serialize};

use crate::plan::{ConversionPlan, is_small_file};

/// Tool, recipe and source of a conversion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    format_version: u32,
    tool: String,
    recipe: Recipe,
    /// Digests of the files whose bytes the plan knows: config, tokenizer, expert table.
    small: Vec<(String, Digest)>,
    shards: Vec<ShardRecord>,
}

impl Identity {
    /// The conversion that a plan describes.
    pub(crate) fn of(plan: &ConversionPlan) -> Self {
        let small = plan.small.iter().map(|f| (f.name.to_owned(), Digest::of(&f.bytes)));
        Self {
            format_version: FORMAT_VERSION,
            tool: crate::TOOL.to_owned(),
            recipe: plan.recipe.clone(),
            small: small.collect(),
            shards: plan.shards.clone(),
        }
    }

    /// What a plan's dense files depend on: the same whether experts are hashed or not.
    pub(crate) fn of_work(plan: &ConversionPlan) -> Self {
        let mut identity = Self::of(plan);
        for (name, digest) in &mut identity.small {
            if name == EXPERT_TABLE_FILE {
                *digest = Digest::of(&without_checksums(plan.expert_table()));
            }
        }
        identity
    }

    /// What the parts of a conversion have in common before all shards are there.
    pub(crate) fn of_parts(recipe: &Recipe) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            tool: crate::TOOL.to_owned(),
            recipe: recipe.clone(),
            small: Vec::new(),
            shards: Vec::new(),
        }
    }

    /// The conversion that made a container.
    pub(crate) fn of_container(manifest: &Manifest) -> Self {
        let small = manifest.files.iter().filter(|f| is_small_file(&f.name));
        Self {
            format_version: manifest.format_version,
            tool: manifest.tool.clone(),
            recipe: manifest.recipe.clone(),
            small: small.map(|f| (f.name.clone(), f.sha256)).collect(),
            shards: manifest.shards.clone(),
        }
    }

    /// How this earlier conversion differs from the one asked for now.
    pub(crate) fn difference(&self, now: &Self) -> Option<String> {
        if self.tool != now.tool || self.format_version != now.format_version {
            return Some(format!("made by {}, this is {}", self.tool, now.tool));
        }
        if self.recipe != now.recipe {
            return Some(format!("made with {}, asked for {}", self.recipe, now.recipe));
        }
        let changed = |old: &ShardRecord| {
            let new = now.shards.iter().find(|s| s.name == old.name);
            (new != Some(old)).then(|| format!("{} is not what it was then", old.name))
        };
        if let Some(shard) = self.shards.iter().find_map(changed) {
            return Some(format!("the snapshot has changed: {shard}"));
        }
        let small = self.small.iter().zip(&now.small).find(|(old, new)| old != new);
        match small {
            Some(((name, _), _)) if name == EXPERT_TABLE_FILE => Some(format!(
                "{name} differs: the experts lie elsewhere, or only one of the two has --hash-experts"
            )),
            Some(((name, _), _)) => Some(format!("the snapshot has changed: {name} differs")),
            None if self != now => Some("the snapshot has other files now".to_owned()),
            None => None,
        }
    }
}
