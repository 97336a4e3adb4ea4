// E0277: cannot be sent between threads safely
// Autocast is switched on for one thread, and off for the same.
use tch_extension::amp::Autocast;

fn move_away(guard: Autocast) {
    std::thread::spawn(move || drop(guard));
}

fn main() {
    let _ = move_away;
}
