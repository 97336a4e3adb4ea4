//! What is read from `adapter_config.json`, and what is written.

use super::*;
use crate::options::Size;

fn config() -> Value {
    // As PEFT 0.21 writes it.
    json!({
        "alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": "x", "bias": "none",
        "ensure_weight_tying": false, "fan_in_fan_out": false, "inference_mode": true,
        "init_lora_weights": true, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 16,
        "lora_bias": false, "lora_dropout": 0.1, "megatron_core": "megatron.core",
        "modules_to_save": null, "peft_type": "LORA", "peft_version": "0.21.2",
        "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": null,
        "target_modules": ["v_proj", "self_attn.q_proj"], "task_type": "CAUSAL_LM",
        "use_dora": false, "use_rslora": false
    })
}

#[test]
fn what_is_written_is_read_again() {
    let model = Size::LlamaMini.model(256);
    let read = read_config(&config()).unwrap();
    assert_eq!((read.rank, read.scale()), (4, 4.0));
    let layers =
        ["q_proj", "v_proj", "k_proj"].map(|name| format!("model.layers.0.self_attn.{name}"));
    assert_eq!(layers.map(|layer| read.is_target(&layer)), [true, true, false]);
    assert!(!read.is_target("model.layers.0.self_attn.my_v_proj"));
    let root = Lora { use_rslora: true, alpha: 2.5, ..read };
    assert_eq!(root.scale(), 1.25);
    for lora in [root, Lora::new(8, &model), Lora::new(8, &Size::Mini.model(256))] {
        assert_eq!(read_config(&to_json(&lora, &model, Path::new("base"))).unwrap(), lora);
    }
}

#[test]
fn what_changes_the_logits_is_refused_by_name() {
    for (key, value, expected) in [
        ("bias", json!("all"), "bias is \"all\""),
        ("use_dora", json!(true), "use_dora is true"),
        ("rank_pattern", json!({"q_proj": 8}), "rank_pattern is"),
        ("alpha_pattern", json!({"q_proj": 8}), "alpha_pattern is"),
        ("modules_to_save", json!(["lm_head"]), "modules_to_save is"),
        ("layers_to_transform", json!([0]), "layers_to_transform is"),
        ("init_lora_weights", json!("pissa"), "init_lora_weights is \"pissa\""),
        ("peft_type", json!("IA3"), "peft_type is \"IA3\""),
        ("task_type", json!("SEQ_CLS"), "task_type is"),
        ("target_modules", json!(".*_proj"), "target_modules is \".*_proj\""),
        ("of_the_future", json!(1), "of_the_future is 1, which this program lacks"),
        ("r", json!(null), "it lacks \"r\""),
        ("r", json!("8"), "r is \"8\""),
        ("lora_alpha", json!(null), "it lacks \"lora_alpha\""),
    ] {
        let mut changed = config();
        changed[key] = value;
        let error = format!("{:#}", read_config(&changed).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    let model = Size::LlamaMini.model(256);
    let new = || Lora::new(8, &model);
    for (lora, expected) in [
        (Lora { rank: 1 << 40, ..new() }, "--lora 1099511627776 is out of range"),
        (Lora { alpha: f64::NAN, ..new() }, "--lora-alpha NaN is out of range"),
        (Lora { targets: ["lm_head".to_string()].into(), ..new() }, "lm_head is unknown"),
    ] {
        let error = lora.check(&model).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
