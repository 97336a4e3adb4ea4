//! States in files: gathered and distributed, with other numbers of ranks.

use super::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tch_extension::distributed::run_ranks;
use tch_extension::nn::state_dict::{load_tensors, save_tensors};

/// A folder for one test, which is empty at first.
fn folder(test: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("sharded-{test}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn build(leaves: &[Tensor]) -> Result<FusedOptimizer> {
    build_as(leaves, AdamW::default())
}

fn build_as(leaves: &[Tensor], config: AdamW) -> Result<FusedOptimizer> {
    let mut optimizer = config.wd(0.1).build_of(named(leaves), 0.02)?;
    optimizer.set_lr_group(1, 0.005)?;
    optimizer.no_weight_decay(|_, tensor| tensor.dim() < 2);
    Ok(optimizer)
}

/// Half and other kinds, and a parameter whose values are not in the order of its dimensions.
fn mixed() -> Vec<Tensor> {
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Double];
    let leaf = |(place, size): (usize, &&[i64])| {
        let leaf = values(size, place as f64, kinds[place % 3], CPU);
        let leaf = if place == 5 { leaf.tr() } else { leaf };
        leaf.set_requires_grad(true)
    };
    SIZES.iter().enumerate().map(leaf).collect()
}

fn sharded(group: &ProcessGroup, leaves: &[Tensor]) -> Result<ShardedOptimizer> {
    ShardedOptimizer::new(group, build(leaves)?, &small_buckets())
}

fn assert_same(left: &BTreeMap<String, Tensor>, right: &BTreeMap<String, Tensor>) {
    assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>());
    for (name, tensor) in left {
        let other = &right[name];
        assert_eq!((tensor.size(), tensor.kind()), (other.size(), other.kind()), "{name}");
        let copy = |tensor: &Tensor| tensor.shallow_clone();
        assert_eq!(bits(&[copy(tensor)]), bits(&[copy(other)]), "{name}");
    }
}

/// Rank 0 writes, and all wait.
fn save_weights(group: &ProcessGroup, leaves: &[Tensor], file: &Path) -> Result<()> {
    if group.rank() == 0 {
        let named = named(leaves).into_iter();
        save_tensors(&named.map(|named| (named.name, named.tensor)).collect(), file)?;
    }
    group.barrier()
}

/// How a state is written and read.
#[derive(Clone, Copy, Debug)]
enum Way {
    OneFile,
    Folder,
}

#[test]
fn states_are_the_same_on_any_number_of_ranks() {
    let configs = [AdamW::default(), AdamW::default().beta2(0.5).amsgrad(true).maximize(true)];
    for (way, config) in
        [Way::OneFile, Way::Folder].into_iter().flat_map(|way| configs.map(|config| (way, config)))
    {
        let folder = folder(&format!("ranks-{way:?}-{}", config.amsgrad));
        let sharded = |group: &ProcessGroup, leaves: &[Tensor]| {
            ShardedOptimizer::new(group, build_as(leaves, config)?, &small_buckets())
        };
        let state = folder.join("state");
        let saved = run_ranks(4, |group| {
            let leaves = mixed();
            let mut optimizer = sharded(&group, &leaves)?;
            train(&leaves, &mut optimizer, 0..3)?;
            match way {
                Way::OneFile => optimizer.save(&state)?,
                Way::Folder => optimizer.save_sharded(&state)?,
            }
            optimizer.gather_state_dict()
        })
        .expect("all ranks");
        assert!(saved[1..].iter().all(Option::is_none));
        let saved = saved[0].as_ref().expect("a state on rank 0");
        assert!(saved["exp_avg.w5"].size() == [3, 64] && saved["step.w0"].int64_value(&[]) == 3);
        assert_eq!(saved["group.1.lr"].double_value(&[]), 0.005);
        assert_eq!(
            saved["group.1.maximize"].double_value(&[]),
            f64::from(u8::from(config.maximize))
        );
        let largest = saved.get("max_exp_avg_sq.w5");
        assert_eq!(largest.map(Tensor::size), config.amsgrad.then(|| vec![3, 64]));
        if let Some(largest) = largest {
            assert_ne!(*largest, saved["exp_avg_sq.w5"], "a state of its own");
        }
        for ranks in [1, 2, 3, 4] {
            let loaded = run_ranks(ranks, |group| {
                let leaves = mixed();
                let mut optimizer = sharded(&group, &leaves)?;
                optimizer.set_lr(7.0)?;
                match way {
                    Way::OneFile => optimizer.load(&state)?,
                    Way::Folder => optimizer.load_sharded(&state)?,
                }
                assert_eq!(optimizer.lr_of_group(1), Some(0.005));
                optimizer.gather_state_dict()
            })
            .expect("all ranks");
            assert_same(loaded[0].as_ref().expect("a state on rank 0"), saved);
        }
        std::fs::remove_dir_all(&folder).expect("an end");
    }
}

/// Saved after two steps on four ranks, and continued on as many.
#[test]
fn a_resumed_run_ends_as_the_uninterrupted_one() {
    let amsgrad = AdamW::default().beta2(0.5).amsgrad(true).maximize(true);
    for (way, config) in [(Way::OneFile, AdamW::default()), (Way::Folder, amsgrad)] {
        let folder = folder(&format!("resume-{way:?}"));
        let sharded = |group: &ProcessGroup, leaves: &[Tensor]| {
            ShardedOptimizer::new(group, build_as(leaves, config)?, &small_buckets())
        };
        let (weights, state) = (folder.join("weights"), folder.join("state"));
        let whole = run_ranks(4, |group| {
            let leaves = mixed();
            let mut optimizer = sharded(&group, &leaves)?;
            train(&leaves, &mut optimizer, 0..2)?;
            match way {
                Way::OneFile => optimizer.save(&state)?,
                Way::Folder => optimizer.save_sharded(&state)?,
            }
            save_weights(&group, &leaves, &weights)?;
            train(&leaves, &mut optimizer, 2..4)?;
            Ok(copies(&leaves))
        })
        .expect("all ranks");
        let resumed = run_ranks(4, |group| {
            let leaves = mixed();
            let mut optimizer = sharded(&group, &leaves)?;
            // The weights are loaded first, into the memory of the sharded optimizer.
            let values = load_tensors(&weights)?;
            for (place, leaf) in leaves.iter().enumerate() {
                let value = &values[&format!("w{place}")];
                tch::no_grad(|| leaf.shallow_clone().f_copy_(value))?;
            }
            match way {
                Way::OneFile => optimizer.load(&state)?,
                Way::Folder => optimizer.load_sharded(&state)?,
            }
            train(&leaves, &mut optimizer, 2..4)?;
            Ok(copies(&leaves))
        });
        let resumed = resumed.expect("all ranks");
        for (resumed, expected) in resumed.iter().zip(&whole) {
            assert_eq!(bits(resumed), bits(expected));
        }
        std::fs::remove_dir_all(&folder).expect("an end");
    }
}

/// The file is an ordinary optimizer's.
#[test]
fn an_ordinary_optimizer_and_a_sharded_one_load_each_other() {
    let folder = folder("ordinary");
    let (of_ranks, of_whole) = (folder.join("ranks"), folder.join("whole"));
    let expected = model(&SIZES, Kind::Float, CPU);
    let mut whole = build(&expected).expect("an optimizer");
    reference(&expected, &mut whole, 2, 0..3);
    whole.save(&of_whole).expect("a file");
    run_ranks(2, |group| {
        let leaves = model(&SIZES, Kind::Float, CPU);
        let mut optimizer = sharded(&group, &leaves)?;
        train(&leaves, &mut optimizer, 0..3)?;
        optimizer.save(&of_ranks)
    })
    .expect("all ranks");
    let (ranks, mut one) =
        (load_tensors(&of_ranks).expect("a file"), load_tensors(&of_whole).expect("a file"));
    // The empty parameter belongs to no rank, so that nobody counts its steps.
    for key in ["exp_avg.w4", "exp_avg_sq.w4"] {
        assert_eq!(one.remove(key).map(|tensor| tensor.size()), Some(vec![0]));
    }
    one.insert("step.w4".to_string(), Tensor::from(0_i64));
    assert_same(&ranks, &one);

    let mut loaded = build(&model(&SIZES, Kind::Float, CPU)).expect("an optimizer");
    loaded.load(&of_ranks).expect("it fits");
    run_ranks(3, |group| {
        let leaves = model(&SIZES, Kind::Float, CPU);
        let mut optimizer = sharded(&group, &leaves)?;
        optimizer.load(&of_whole)?;
        let ranks = load_tensors(&of_ranks)?;
        if let Some(state) = optimizer.gather_state_dict()? {
            assert_same(&state, &ranks);
        }
        let mut optimizer = sharded(&group, &model(&SIZES, Kind::Float, CPU))?;
        optimizer.load_state_dict(&ranks)
    })
    .expect("all ranks");
    std::fs::remove_dir_all(&folder).expect("an end");
}

#[test]
fn states_of_torch_are_distributed() {
    let folder = folder("torch");
    let file = folder.join("torch");
    let leaves = model(&SIZES[..3], Kind::Float, CPU);
    let mut tensors = BTreeMap::new();
    for (index, leaf) in leaves.iter().enumerate() {
        let moment = |seed| values(&leaf.size(), seed, Kind::Float, CPU);
        tensors.insert(format!("state.{index}.exp_avg"), moment(1.0));
        tensors.insert(format!("state.{index}.exp_avg_sq"), moment(2.0).square());
        tensors.insert(format!("state.{index}.step"), Tensor::from(5.0_f32));
    }
    save_tensors(&tensors, &file).expect("a file");
    let names = ["w0", "w1", "w2"];
    let all = run_ranks(3, |group| {
        let leaves = model(&SIZES[..3], Kind::Float, CPU);
        let mut optimizer = sharded(&group, &leaves)?;
        optimizer.load_torch(&file, &names)?;
        optimizer.gather_state_dict()
    })
    .expect("all ranks");
    let state = all[0].as_ref().expect("a state");
    for (index, name) in names.iter().enumerate() {
        assert_eq!(state[&format!("exp_avg.{name}")], tensors[&format!("state.{index}.exp_avg")]);
        assert_eq!(state[&format!("step.{name}")].int64_value(&[]), 5);
    }
    std::fs::remove_dir_all(&folder).expect("an end");
}

/// One rank has another file than the others.
#[test]
fn what_one_rank_cannot_load_no_rank_loads() {
    let folder = folder("refused");
    let leaves = model(&SIZES, Kind::Float, CPU);
    let mut whole = build(&leaves).expect("an optimizer");
    reference(&leaves, &mut whole, 1, 0..2);
    let good = whole.state_dict().expect("state_dict");
    let change = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
        let mut bad: BTreeMap<String, Tensor> =
            good.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        change(&mut bad);
        bad
    };
    let cases: [(&str, BTreeMap<String, Tensor>); 5] = [
        ("exp_avg.w7", change(&|bad| drop(bad.remove("exp_avg.w7")))),
        ("step.w0", change(&|bad| drop(bad.remove("step.w0")))),
        ("other", change(&|bad| drop(bad.insert("other".into(), Tensor::from(1.0))))),
        ("group.1.lr", change(&|bad| drop(bad.insert("group.1.lr".into(), Tensor::from(-1.0))))),
        (
            "shape [19, 37]",
            change(&|bad| {
                let turned = bad["exp_avg.w0"].tr();
                bad.insert("exp_avg.w0".into(), turned);
            }),
        ),
    ];
    for (place, (what, bad)) in cases.iter().enumerate() {
        let (right, wrong) =
            (folder.join(format!("right-{place}")), folder.join(format!("wrong-{place}")));
        save_tensors(&good, &right).expect("a file");
        save_tensors(bad, &wrong).expect("a file");
        let outcomes = outcomes(3, |group| {
            let leaves = model(&SIZES, Kind::Float, CPU);
            let mut optimizer = sharded(&group, &leaves)?;
            train(&leaves, &mut optimizer, 0..1)?;
            let before = optimizer.gather_state_dict()?;
            // Every rank reads the bad file, because only some have the piece that it lacks.
            let error = optimizer.load(&wrong).expect_err("it is not right").to_string();
            if let (Some(before), Some(after)) = (before, optimizer.gather_state_dict()?) {
                assert_same(&before, &after);
            }
            let file = if group.rank() == 1 { folder.join("missing") } else { right.clone() };
            let missing = optimizer.load(file).expect_err("there is no file").to_string();
            optimizer.load(&right)?;
            Ok((error, missing))
        });
        for outcome in outcomes {
            let (error, missing) = outcome.expect("an error of loading only");
            assert!(error.contains(what) && !error.contains('\n'), "{error}");
            assert!(missing.contains("missing"), "{missing}");
        }
    }
    std::fs::remove_dir_all(&folder).expect("an end");
}

#[test]
fn a_folder_has_the_last_complete_state() {
    let folder = folder("folder");
    let other = folder.join("model.safetensors");
    std::fs::write(&other, "not ours").expect("a file");
    let names = || {
        let entries = std::fs::read_dir(&folder).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name()).collect::<Vec<_>>()
    };
    for ranks in [3, 2] {
        run_ranks(ranks, |group| {
            let leaves = model(&SIZES, Kind::Float, CPU);
            let mut optimizer = sharded(&group, &leaves)?;
            train(&leaves, &mut optimizer, 0..ranks)?;
            optimizer.save_sharded(&folder)
        })
        .expect("all ranks");
        // Those of the ranks, the index, and what is not ours.
        assert_eq!(names().len(), ranks + 2);
    }
    run_ranks(1, |group| {
        let mut optimizer = sharded(&group, &model(&SIZES, Kind::Float, CPU))?;
        optimizer.load_sharded(&folder)?;
        let state = optimizer.gather_state_dict()?.expect("a state");
        assert_eq!(state["step.w0"].int64_value(&[]), 2);
        Ok(())
    })
    .expect("one rank");

    // Files of two savings, and parameters in another order of memory.
    let shard = |rank: &str| {
        let found = names().into_iter().find(|name| name.to_string_lossy().contains(rank));
        folder.join(found.expect("a file of the rank"))
    };
    let (first, second) = (shard("-0-of-2"), shard("-1-of-2"));
    let load = |leaves: &dyn Fn() -> Vec<Tensor>| {
        let group = ProcessGroup::single().expect("a group");
        let mut optimizer = sharded(&group, &leaves()).expect("an optimizer");
        optimizer.load_sharded(&folder).expect_err("it does not fit").to_string()
    };
    let turned = || {
        let mut leaves = model(&SIZES, Kind::Float, CPU);
        leaves[0] = values(&[19, 37], 0.0, Kind::Float, CPU).tr().set_requires_grad(true);
        leaves
    };
    let error = load(&turned);
    assert!(error.contains("with strides [1, 37], got"), "{error}");
    let plain = || model(&SIZES, Kind::Float, CPU);
    let fewer = || model(&SIZES[..7], Kind::Float, CPU);
    let error = load(&fewer);
    assert!(error.contains("the unexpected") && error.contains("w7"), "{error}");
    let mut tensors = load_tensors(&first).expect("a file");
    tensors.insert("saving".to_string(), Tensor::from_slice(&[1_i64, 2]));
    save_tensors(&tensors, &first).expect("a file");
    let error = load(&plain);
    assert!(error.contains("the number of its saving"), "{error}");
    std::fs::remove_file(second).expect("a file");
    let error = load(&plain);
    assert!(error.contains("nothing was loaded") || error.contains("-1-of-2"), "{error}");
    std::fs::remove_dir_all(&folder).expect("an end");
}

/// Rank 0 cannot write.
#[test]
fn an_error_of_writing_is_one_of_all_ranks() {
    let folder = folder("write");
    let file = folder.join("no-folder").join("state");
    let blocked = folder.join("blocked");
    std::fs::write(&blocked, "a file").expect("a file");
    for outcome in outcomes(2, |group| {
        let leaves = model(&SIZES, Kind::Float, CPU);
        let optimizer = sharded(&group, &leaves)?;
        let one = optimizer.save(&file).expect_err("there is no folder").to_string();
        let many = optimizer.save_sharded(&blocked).expect_err("it is a file").to_string();
        Ok((one, many))
    }) {
        let (one, many) = outcome.expect("errors of writing only");
        assert!(one.starts_with("ShardedOptimizer::save: "), "{one}");
        assert!(many.contains("blocked"), "{many}");
    }
    std::fs::remove_dir_all(&folder).expect("an end");
}
