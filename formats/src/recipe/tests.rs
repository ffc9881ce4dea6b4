use safetensors::Dtype;

use super::*;

fn spec(class: TensorClass, layer: usize, name: &str, cols: usize) -> TensorSpec {
    let name = format!("model.layers.{layer}.{name}");
    TensorSpec { name, dtype: Dtype::BF16, shape: vec![8, cols], class, layer: Some(layer) }
}

fn json(recipe: &Recipe) -> String {
    serde_json::to_string(recipe).unwrap()
}

#[test]
fn classes_and_fallback() {
    let recipe = Recipe::default();
    let format = |class, cols| recipe.format_of(&spec(class, 0, "x", cols));
    assert_eq!(format(TensorClass::Kda, 128), Some(MatrixFormat::Int4G64));
    assert_eq!(format(TensorClass::Kda, 96), Some(MatrixFormat::Int8Row));
    assert_eq!(format(TensorClass::Mla, 128), Some(MatrixFormat::Int8Row));
    assert_eq!(format(TensorClass::Router, 128), None);
    assert_eq!(format(TensorClass::Embedding, 128), None);
    let error = Recipe::of_bits(5, 8, 8).unwrap_err();
    assert_eq!(error.to_string(), "expected 4, 8 or 16 bits, found 5");
}

#[test]
fn the_first_rule_that_fits_decides() {
    let recipe = Recipe::parse(
        r#"{"name": "mine", "rules": [
            {"tensor": "o_proj.weight", "layers": "0-3, 7", "format": "bf16"},
            {"class": "kda", "format": "int8-row"},
            {"format": "int4-g32"}]}"#,
    )
    .unwrap();
    assert_eq!((recipe.name(), recipe.scales()), (Some("mine"), Scales::Mse));
    let format = |class, layer, name| recipe.format_of(&spec(class, layer, name, 96)).unwrap();
    let (kda, mla) = (TensorClass::Kda, TensorClass::Mla);
    assert_eq!(format(kda, 3, "self_attn.o_proj.weight"), MatrixFormat::Bf16);
    assert_eq!(format(mla, 7, "self_attn.o_proj.weight"), MatrixFormat::Bf16);
    assert_eq!(format(kda, 4, "self_attn.o_proj.weight"), MatrixFormat::Int8Row);
    assert_eq!(format(kda, 3, "self_attn.no_proj.weight"), MatrixFormat::Int8Row);
    assert_eq!(format(mla, 4, "self_attn.o_proj.weight"), MatrixFormat::Int4G32);
    let again = Recipe::parse(&json(&recipe)).unwrap();
    assert_eq!(again, recipe);
    assert!(json(&recipe).contains(r#""layers":"0-3,7""#), "{}", json(&recipe));
}

#[test]
fn bits_and_the_seeds_recipe_are_written_as_bits() {
    let bits = r#"{"bits":4,"mla_bits":8,"head_bits":8}"#;
    assert_eq!(json(&Recipe::default()), bits);
    assert_eq!(Recipe::parse(bits).unwrap(), Recipe::named("seed").unwrap());
    assert_eq!(Recipe::default().to_string(), "--bits 4 --mla-bits 8 --head-bits 8");
    let mse = Recipe::default().with_scales(Scales::Mse);
    assert_eq!(Recipe::parse(&json(&mse)).unwrap(), mse);
    assert_eq!(mse.to_string(), "a recipe of 3 rules --scales mse");
    for (name, _) in Recipe::NAMES {
        let recipe = Recipe::named(name).unwrap();
        assert_eq!(Recipe::parse(&json(&recipe)).unwrap(), recipe);
    }
    assert_eq!(Recipe::named("balanced").unwrap().to_string(), "--recipe balanced --scales mse");
    assert_eq!(Recipe::named("abacus"), None);
}

#[test]
fn wrong_recipes_are_told_what_is_wrong() {
    for (text, expected) in [
        ("{}", "not a recipe"),
        (r#"{"bits":3,"mla_bits":8,"head_bits":8}"#, "expected 4, 8 or 16 bits, found 3"),
        (r#"{"rules": []}"#, "the last rule of a recipe must cover every matrix"),
        (r#"{"rules": [{"class": "kda", "format": "bf16"}]}"#, "must cover every matrix"),
        (r#"{"rules": [{"format": "int3"}]}"#, "no format called \"int3\"; there are bf16"),
        (r#"{"rules": [{"class": "router", "format": "bf16"}]}"#, "there are kda, shared, mla"),
        (r#"{"rules": [{"layers": "3-1", "format": "bf16"}]}"#, "expected layers as in 0-3,7"),
        (r#"{"rules": [{"layers": "1-99999999999999999999", "format": "bf16"}]}"#, "0-3,7"),
        (r#"{"scales": "best", "rules": [{"format": "bf16"}]}"#, "no scales called \"best\""),
    ] {
        let error = Recipe::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let many = vec![Rule::all(MatrixFormat::Bf16); MAX_RULES + 1];
    assert!(Recipe::new(None, many, Scales::Mse).is_err());
}

#[test]
fn layers_are_written_short() {
    let layers: Layers = [0, 1, 2, 7, 9, 10].into_iter().collect();
    assert_eq!(layers.to_string(), "0-2,7,9-10");
    assert_eq!(layers.to_string().parse::<Layers>().unwrap(), layers);
    assert!(layers.contains(10) && !layers.contains(8));
}
