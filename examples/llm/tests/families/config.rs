//! What is read from `config.json`, and what is written.

use super::*;

fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 32
    })
}

fn with(changes: &Value) -> Result<ModelConfig> {
    let mut config = llama();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    read(&config, &Value::Null)
}

#[test]
fn the_traps_of_files_are_known() {
    let rope = |changes: Value| {
        let llama = with(&changes).unwrap().llama.unwrap();
        (llama.theta, llama.scaling)
    };
    let linear = Scaling::Linear { factor: 2.0 };
    assert_eq!(rope(json!({})), (1e4, Scaling::Default));
    assert_eq!(rope(json!({"rope_theta": 5e5, "rope_scaling": null})), (5e5, Scaling::Default));
    let old = json!({"rope_scaling": {"type": "linear", "factor": 2}});
    assert_eq!(rope(old), (1e4, linear));
    let new = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7}});
    assert_eq!(rope(new), (7.0, linear));

    let of = |changes: Value| with(&changes).unwrap().llama.unwrap();
    assert_eq!(of(json!({"head_dim": 8})).head_dim, 8);
    assert_eq!(of(json!({"head_dim": null})).head_dim, 4);
    assert!(of(json!({"model_type": "qwen2"})).bias);
    assert_eq!(of(json!({"model_type": "qwen3"})).head_dim, 128);
    let context = |changes: Value| with(&changes).unwrap().context;
    let mistral = |window| json!({"model_type": "mistral", "sliding_window": window, "num_key_value_heads": 2});
    assert_eq!(context(mistral(json!(8))), 8);
    assert_eq!(context(mistral(Value::Null)), 32);
    assert_eq!(context(json!({"model_type": "qwen2", "sliding_window": 8})), 32);

    let ends = |config: Value, generation: Value| {
        let mut all = llama();
        all["eos_token_id"] = config;
        read(&all, &json!({"eos_token_id": generation})).unwrap().ends
    };
    assert_eq!(ends(json!(2), Value::Null), [2]);
    assert_eq!(ends(json!(2), json!([3, 4])), [3, 4]);
    assert!(ends(Value::Null, Value::Null).is_empty());
}

#[test]
fn what_is_written_is_read_again() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8
    });
    for changes in [
        json!({"rope_scaling": scaling, "rope_theta": 5e5, "tie_word_embeddings": true}),
        json!({"model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 2, "head_dim": 6}),
        json!({"model_type": "qwen2", "eos_token_id": [3, 4], "rms_norm_eps": 1e-6}),
        json!({"model_type": "qwen3", "attention_bias": true, "use_sliding_window": true}),
    ] {
        let config = with(&changes).unwrap();
        let written = to_json(&config, None, None).unwrap();
        assert_eq!(read(&written, &Value::Null).unwrap(), config, "{written}");
    }
}

#[test]
fn other_models_and_absurd_numbers_are_refused_by_name() {
    for (changes, expected) in [
        (json!({"model_type": null}), "it lacks the model_type: give gpt2"),
        (json!({"model_type": "mamba"}), "model_type is \"mamba\", not gpt2, llama"),
        (json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\""),
        (json!({"mlp_bias": true}), "mlp_bias is true"),
        (json!({"quantization_config": {}}), "quantization_config"),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}), "yarn"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}), "greater than 0"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "factor"),
        (json!({"rope_scaling": 7}), "rope_scaling is 7"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
            "the same in all layers",
        ),
        (json!({"rope_theta": "500000"}), "rope_theta is \"500000\""),
        (json!({"rms_norm_eps": "1e-5"}), "rms_norm_eps is \"1e-5\""),
        (json!({"model_type": "mistral", "sliding_window": "4096"}), "sliding_window is \"4096\""),
        (json!({"eos_token_id": "</s>"}), "eos_token_id is \"</s>\""),
        (json!({"hidden_size": 15}), "--dim 15 is no multiple of --heads 4"),
        (json!({"vocab_size": null}), "\"vocab_size\""),
        (json!({"num_attention_heads": 0}), "--heads 0"),
        (json!({"num_key_value_heads": 3}), "no multiple of num_key_value_heads 3"),
        (json!({"head_dim": 7}), "head_dim 7 is odd"),
        (json!({"intermediate_size": -1}), "intermediate_size -1"),
        (
            json!({"max_position_embeddings": 1_i64 << 60}),
            "max_position_embeddings 1152921504606846976",
        ),
        (json!({"rms_norm_eps": -1.0}), "rms_norm_eps"),
        (json!({"rope_theta": 0.0}), "base"),
    ] {
        let error = format!("{:#}", with(&changes).unwrap_err());
        assert!(error.contains(expected), "{changes}: {error}");
    }
    let gpt2 = |key: &str, value: Value| {
        let mut config = json!({
            "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 4, "vocab_size": 9
        });
        config[key] = value;
        read(&config, &Value::Null)
    };
    assert!(gpt2("n_inner", Value::Null).is_ok() && gpt2("n_inner", json!(32)).is_ok());
    for (key, value) in [
        ("activation_function", json!("relu")),
        ("n_inner", json!(31)),
        ("tie_word_embeddings", json!(false)),
    ] {
        assert!(format!("{:#}", gpt2(key, value).unwrap_err()).contains(key));
    }
}
