//! Recipes against the formats that llama.cpp chose (see `golden/README.md`).

use std::collections::BTreeMap;

use qgemm_formats::{ModelShape, Recipe, RecipeOptions, TypeChooser};
use serde_json::Value;

/// Name and shape of a model's tensors, in llama.cpp's order.
fn tensors(model: &Value) -> Vec<(String, Vec<usize>)> {
    let of = |list: &Value, prefix: &str| {
        let tensor = |tensor: &Value| {
            let shape = tensor[1].as_array().expect("dimensions").iter().map(|n| number(n) as usize);
            (format!("{prefix}{}", tensor[0].as_str().expect("a name")), shape.collect())
        };
        list.as_array().expect("tensors").iter().map(tensor).collect::<Vec<_>>()
    };
    let layers = 0..number(&model["layers"]);
    let mut all = of(&model["tensors"], "");
    all.extend(layers.flat_map(|layer| of(&model["layer_tensors"], &format!("blk.{layer}."))));
    all.sort_by(|(a, _), (b, _)| TypeChooser::sort_key(a).cmp(&TypeChooser::sort_key(b)));
    all
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

/// Formats by tensor name. A name that all layers have maps to its formats
/// in order of layers, such as `q6_k*4 q4_k*28`.
/// Tensors of the recipe's own format are absent.
fn chosen(model: &Value, recipe: Recipe, has_importance: bool) -> BTreeMap<String, String> {
    let size = |key: &str| number(&model[key]) as usize;
    let shape = ModelShape {
        architecture: model["architecture"].as_str().expect("a name").to_owned(),
        layers: size("layers"),
        heads: size("heads"),
        kv_heads: size("kv_heads"),
        experts: size("experts"),
    };
    let tensors = tensors(model);
    let options = RecipeOptions { has_importance, ..RecipeOptions::default() };
    let mut chooser = TypeChooser::new(recipe, shape, options, tensors.iter().map(|(name, _)| name.as_str()));
    let mut runs: BTreeMap<String, Vec<(&str, usize)>> = BTreeMap::new();
    for (name, shape) in &tensors {
        let format = chooser.choose(name, shape, None).unwrap_or_else(|error| panic!("{recipe}: {error}"));
        let of_layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let runs = runs.entry(of_layer.map_or(name.as_str(), |(_, name)| name).to_owned()).or_default();
        match runs.last_mut() {
            Some((last, count)) if *last == format.name => *count += 1,
            _ => runs.push((format.desc().name, 1)),
        }
    }
    let is_layer = |name: &String| !model["tensors"].as_array().expect("tensors").iter().any(|t| t[0] == name.as_str());
    let written = |name: &String, runs: &[(&str, usize)]| match is_layer(name) {
        true => runs.iter().map(|(format, count)| format!("{format}*{count}")).collect::<Vec<_>>().join(" "),
        false => runs[0].0.to_owned(),
    };
    runs.retain(|_, runs| runs.iter().any(|(format, _)| *format != recipe.format().name));
    runs.iter().map(|(name, runs)| (name.clone(), written(name, runs))).collect()
}

#[test]
fn recipes_choose_as_llama_cpp() {
    let golden: Value = serde_json::from_str(include_str!("golden/recipes.json")).expect("JSON");
    let mut checked = 0;
    for case in golden["types"].as_array().expect("cases") {
        let models = golden["models"].as_array().expect("models");
        let model = models.iter().find(|model| model["name"] == case["model"]).expect("a model");
        let recipe: Recipe = case["recipe"].as_str().expect("a name").parse().expect("a recipe");
        let expected: BTreeMap<String, String> = serde_json::from_value(case["types"].clone()).expect("formats");
        // `null` stands for both.
        for has_importance in [false, true] {
            // llama.cpp refuses it later.
            let is_refused = recipe.name() == "Q2_K_S" && !has_importance;
            if case["importance"].as_bool().is_some_and(|of| of != has_importance) || is_refused {
                continue;
            }
            assert_eq!(chosen(model, recipe, has_importance), expected, "{recipe} {} {has_importance}", case["model"]);
            checked += 1;
        }
    }
    assert!(checked > 300, "{checked}");
}
